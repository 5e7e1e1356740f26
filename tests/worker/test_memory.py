"""What is free, from the kernel's files, and the pool's size from it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headstart.executor.base import StartupError
from headstart.kv.pool import KVPool
from headstart.ops import HeadShape, KVFormat, TorchOps
from headstart.worker.memory import PoolRequest, free_container_memory, free_host_memory, free_memory, num_blocks

REQUEST = PoolRequest(
    bytes_per_block=1000, block_size=16, max_model_len=160, max_num_seqs=4, wanted_bytes=None, min_tokens=2
)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_host_memory_is_what_the_kernel_calls_available(tmp_path):
    write(tmp_path / "meminfo", "MemTotal: 100 kB\nMemFree: 10 kB\nMemAvailable:   40 kB\n")
    assert free_host_memory(tmp_path / "meminfo") == 40 * 1024
    assert free_host_memory(tmp_path / "absent") > 0


def test_container_memory_v2_is_the_tightest_of_all_levels(tmp_path):
    own = tmp_path / "self"
    write(own, "0::/pod/box\n")
    root = tmp_path / "cgroup"
    write(root / "pod" / "memory.max", "1000\n")
    write(root / "pod" / "memory.current", "700\n")
    write(root / "pod" / "memory.stat", "anon 500\ninactive_file 150\n")
    write(root / "pod" / "box" / "memory.max", "max\n")
    write(root / "pod" / "box" / "memory.current", "700\n")
    assert free_container_memory(root, own) == 1000 - 700 + 150


def test_container_memory_v1(tmp_path):
    own = tmp_path / "self"
    write(own, "4:cpu,memory:/box\n1:pids:/\n")
    root = tmp_path / "cgroup"
    write(root / "memory" / "box" / "memory.limit_in_bytes", "5000")
    write(root / "memory" / "box" / "memory.usage_in_bytes", "4000")
    write(root / "memory" / "box" / "memory.stat", "inactive_file 1\ntotal_inactive_file 300\n")
    write(root / "memory" / "memory.limit_in_bytes", str(2**63 - 4096))
    write(root / "memory" / "memory.usage_in_bytes", "9000")
    assert free_container_memory(root, own) == 1300


def test_container_memory_inside_a_container_reads_the_mount_itself(tmp_path):
    own = tmp_path / "self"
    write(own, "0::/../outer/path\n")
    write(tmp_path / "cgroup" / "memory.max", "100")
    write(tmp_path / "cgroup" / "memory.current", "60")
    assert free_container_memory(tmp_path / "cgroup", own) == 40


def test_no_limit_is_a_huge_number(tmp_path):
    assert free_container_memory(tmp_path, tmp_path / "absent") > 1 << 50
    write(tmp_path / "self", "0::/\n")
    assert free_container_memory(tmp_path, tmp_path / "self") > 1 << 50


def test_this_machine_has_memory():
    assert 0 < free_memory(torch.device("cpu")) < 1 << 50


def test_half_of_what_is_free():
    assert num_blocks(REQUEST, 30_000) == 15


def test_never_more_than_the_longest_requests_need():
    assert num_blocks(REQUEST, 10**9) == 4 * 10
    assert num_blocks(replace(REQUEST, wanted_bytes=10**8), 10**9) == 40


def test_the_callers_choice():
    assert num_blocks(replace(REQUEST, wanted_bytes=7_999), 8_000) == 7


def test_more_than_is_free_is_refused_with_both_numbers():
    with pytest.raises(StartupError, match=r"30\.0 MB.*20\.0 MB"):
        num_blocks(replace(REQUEST, bytes_per_block=10**6, wanted_bytes=30 * 10**6), 20 * 10**6)


def test_less_than_one_request_is_refused_with_the_numbers():
    with pytest.raises(StartupError, match=r"hold 48 tokens.*needs 160 tokens"):
        num_blocks(replace(REQUEST, min_tokens=160), 7_000)
    with pytest.raises(StartupError, match=r"kv_cache_memory"):
        num_blocks(replace(REQUEST, wanted_bytes=999), 10_000)


def test_a_large_pool_costs_no_memory_before_it_is_written():
    layout = TorchOps().kv_layout(HeadShape(8, 4, 8), 16, KVFormat.BFLOAT16)
    before = resident_bytes()
    pool = KVPool(layout, 5, 50_000, "cpu")
    assert pool.data.nbytes > 500e6
    assert resident_bytes() - before < 50e6
    pool.data[-1, -1, -1] = 1
    assert pool.layers[-1][-1, -2:].tolist() == [0, 1]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
