"""The CPU's operations against plain torch, and the bits of their rows."""

from __future__ import annotations

import pytest
import torch

from headstart.ops import CpuOps, TorchOps, make_ops
from headstart.ops.cpu_linear import splits_into_whole_vectors
from headstart.ops.flash_shapes import KEY_TILE, find_flash_shapes, flash_attention

ROWS = 130


@pytest.fixture(scope="module")
def cpu() -> CpuOps:
    return CpuOps(16)


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(172, 64), (64, 172), (1, 8), (96, 100)])
def test_linears_agree_and_their_rows_stand_alone(cpu: CpuOps, rows: int, columns: int, biased: bool) -> None:
    weight, bias = inputs(rows, columns), inputs(rows) if biased else None
    x, residual = inputs(ROWS, columns), inputs(ROWS, rows)
    fast, plain = cpu.linear(weight, bias), TorchOps().linear(weight, bias)
    torch.testing.assert_close(fast(x), plain(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fast.add(x, residual), plain.add(x, residual), rtol=1e-4, atol=1e-4)
    up = inputs(rows, columns).flip(0)
    gated, plain_gated = cpu.gated_linear(weight, up, bias, bias), TorchOps().gated_linear(weight, up, bias, bias)
    torch.testing.assert_close(gated(x), plain_gated(x), rtol=1e-3, atol=1e-3)
    whole, whole_add, whole_gated = fast(x), fast.add(x, residual), gated(x)
    for first, last in ((0, 1), (5, 7), (60, 125), (129, 130), (1, 34)):
        assert torch.equal(fast(x[first:last]), whole[first:last])
        assert torch.equal(fast.add(x[first:last], residual[first:last]), whole_add[first:last])
        assert torch.equal(gated(x[first:last]), whole_gated[first:last])


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_gated_rows_stand_alone_however_threads_share_them(cpu: CpuOps, threads: int) -> None:
    """Rows of whole vectors take torch's own silu, whose bits differ where a vector is cut."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert splits_into_whole_vectors(384, threads)
        gated = cpu.gated_linear(inputs(384, 16), inputs(384, 16).flip(0), None, None)
        x = inputs(700, 16)
        whole = gated(x)
        for rows in (*range(1, 40), 85, 86, 127, 171, 255, 257, 333, 511, 513, 699):
            assert torch.equal(gated(x[:rows]), whole[:rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("size", "threads", "splits"), [(1536, 2, True), (1536, 4, True), (1536, 5, False), (172, 1, False), (32, 2, False)]
)
def test_whole_vectors(size: int, threads: int, splits: bool) -> None:
    assert splits_into_whole_vectors(size, threads) is splits


@pytest.mark.parametrize("size", [8, 10, 64, 576])
def test_norms_agree_and_their_rows_stand_alone(cpu: CpuOps, size: int) -> None:
    x, weight = inputs(ROWS, size) * 3, inputs(size)
    norm = cpu.rms_norm(weight, 1e-2)
    torch.testing.assert_close(norm(x), TorchOps().rms_norm(weight, 1e-2)(x))
    assert torch.equal(torch.cat([norm(row) for row in x.split(7)]), norm(x))
    assert torch.equal(torch.cat([norm(row) for row in x.split(1)]), norm(x))
    assert not norm(torch.zeros(2, size)).any()


@pytest.mark.parametrize("head_dim", [8, 64, 128])
def test_flash_shapes_are_safe(head_dim: int) -> None:
    """Rows and contexts padded as promised have the bits of full tiles, for other numbers than the search used."""
    shapes = find_flash_shapes(head_dim)
    assert shapes.safe_keys[-1] == shapes.cuts[-1] == KEY_TILE
    q, k, v = inputs(2, 1, 64, head_dim), inputs(2, 1, 2 * KEY_TILE, head_dim), inputs(2, 1, 2 * KEY_TILE, head_dim)
    for context in (1, 15, 17, 190, 200, 300, 385, 511, 512, 513, 520, 790, 1000, 1024):
        mask = torch.zeros(1, 2 * KEY_TILE)
        mask[:, context:] = -torch.inf
        whole = flash_attention(q, k, v, mask.expand(64, -1), 0.3)
        padded, rows = shapes.padded(context), shapes.padded_rows(1)
        assert context <= padded <= context + KEY_TILE
        got = flash_attention(
            q[:, :, :rows], k[:, :, :padded], v[:, :, :padded], mask[:, :padded].expand(rows, -1), 0.3
        )
        assert torch.equal(got, whole[:, :, :rows])


def test_the_operations_fit_the_place() -> None:
    assert isinstance(make_ops(torch.device("cpu"), torch.float32, 16), CpuOps)
    assert isinstance(make_ops(torch.device("cpu"), torch.bfloat16, 16), TorchOps)
    assert isinstance(make_ops(torch.device("cuda"), torch.float32, 16), TorchOps)
