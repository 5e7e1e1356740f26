"""Fixtures of the whole suite: where the data lies, and the real default model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headstart.perf.openmp import spin_briefly

ROOT = Path(__file__).resolve().parents[1]

# Two test processes on a small machine must not fight over its cores; set before anything loads torch.
os.environ.setdefault("OMP_NUM_THREADS", "2")
spin_briefly(os.environ)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the caller's shell sets for a server of theirs must not change what is tested."""
    for variable in [name for name in os.environ if name.startswith("HEADSTART_")]:
        if variable == "HEADSTART_CACHE":  # where the default model may lie already
            continue
        monkeypatch.delenv(variable)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The data that lies beside the repository (`../shared/data`, described in its README)."""
    path = ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"needs the test data in {path}")
    return path
