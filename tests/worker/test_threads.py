"""How many cores may be used, and single-threaded sections."""

from __future__ import annotations

import os

import pytest
import torch

from headstart.worker.threads import single_thread, usable_cores


def test_without_a_quota_it_is_the_affinity(tmp_path):
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("quota", "cores"), [("50000 100000", 1), ("100000 100000", 1), ("10000000 100000", None)])
def test_a_quota_lowers_it(tmp_path, quota, cores):
    (tmp_path / "cpu.max").write_text(quota)
    assert usable_cores(tmp_path) == (cores or len(os.sched_getaffinity(0)))


def test_no_limit_in_either_version(tmp_path):
    (tmp_path / "cpu.max").write_text("max 100000")
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))
    old = tmp_path / "old"
    (old / "cpu").mkdir(parents=True)
    (old / "cpu" / "cpu.cfs_quota_us").write_text("-1")
    (old / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert usable_cores(old) == len(os.sched_getaffinity(0))
    (old / "cpu" / "cpu.cfs_quota_us").write_text("90000")
    assert usable_cores(old) == 1


def test_single_thread_gives_the_threads_back_even_after_an_error():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with single_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
        with pytest.raises(KeyError), single_thread():
            raise KeyError
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
