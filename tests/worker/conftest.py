"""Fixtures of the worker's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headstart.worker.threads import single_thread


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch as the model runner sets it for sampling; tiny operations on many threads are slow, too."""
    with single_thread():
        yield
