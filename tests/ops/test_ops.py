"""The operations: our kernels against plain torch, and which of them fits where."""

from __future__ import annotations

import torch

from headstart.ops import TorchOps, has_native_kernels, make_ops


def test_the_operations_fit_the_place() -> None:
    assert has_native_kernels(), "build native/ first: pip install -e ."
    for dtype, native in ((torch.float32, True), (torch.bfloat16, True), (torch.float16, False)):
        assert isinstance(make_ops(torch.device("cpu"), dtype, threads=1), TorchOps) is not native
    assert isinstance(make_ops(torch.device("cuda"), torch.float32, threads=1), TorchOps)
