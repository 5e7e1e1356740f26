"""Compute threads of this process: how many it may use, and work that is better done by one.

Owns the settings of torch's thread pool; knows nothing of models.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Cores that this process may keep busy: its CPU affinity, or a container's CPU quota if that is less."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota(cgroup)
    return affinity if quota is None else max(1, min(affinity, math.ceil(quota)))


def _cpu_quota(cgroup: Path) -> float | None:
    """CPU seconds a second that the container may use; None without a limit. More threads would only be throttled."""
    try:
        if (cgroup / "cpu.max").is_file():  # cgroup v2
            limit, period = (cgroup / "cpu.max").read_text().split()
        else:
            limit = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text()
        quota = float(limit) / float(period)
    except (OSError, ValueError):  # no cgroups here, or "max"
        return None
    return quota if quota > 0 else None


@contextmanager
def single_thread() -> Iterator[None]:
    """Run torch's operations in the calling thread alone: on 50,000 numbers waking others costs more than it saves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
