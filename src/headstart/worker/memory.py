"""How much memory there is, and how many KV blocks that makes.

Owns reading the machine's and the container's limits, and the sizing rule. Must not allocate anything.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from headstart.executor.base import StartupError

_MEMINFO = Path("/proc/meminfo")
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CGROUP_OF_SELF = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a huge number


def free_memory(device: torch.device) -> int:
    """Bytes that may still be allocated on `device`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(free_host_memory(), free_container_memory())


def free_host_memory(meminfo: Path = _MEMINFO) -> int:
    """Bytes of RAM that the kernel can give without swapping; where it does not say, what is not in use."""
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_container_memory(root: Path = _CGROUP_ROOT, own: Path = _CGROUP_OF_SELF) -> int:
    """Bytes left under the tightest memory limit of this process's cgroups (v1 or v2); a huge number without one."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return _UNLIMITED
    folders: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folders += _with_parents(root, path) + _with_parents(root / "unified", path)
        elif "memory" in controllers.split(","):
            folders += _with_parents(root / "memory", path)
    return min((_left(folder) for folder in folders), default=_UNLIMITED)


def _with_parents(mount: Path, path: str) -> list[Path]:
    """The cgroup at `path` and all above it. Inside a container the path may not exist: then the mount counts."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [mount.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _left(folder: Path) -> int:
    limit = _number(folder / "memory.max", folder / "memory.limit_in_bytes")
    used = _number(folder / "memory.current", folder / "memory.usage_in_bytes")
    if limit is None or used is None or limit >= _UNLIMITED:
        return _UNLIMITED
    return max(0, limit - used + _reclaimable(folder / "memory.stat"))


def _number(*files: Path) -> int | None:
    for file in files:
        try:
            return int(file.read_text())
        except (OSError, ValueError):  # absent, or "max"
            continue
    return None


def _reclaimable(stat: Path) -> int:
    """Bytes of page cache that count as used and are given up on demand: mapped model files, mostly."""
    try:
        fields = dict(line.split() for line in stat.read_text().splitlines())
        return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
    except (OSError, ValueError):
        return 0


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """What the KV pool's size follows from. Bytes and tokens."""

    bytes_per_block: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    wanted_bytes: int | None  # the caller's choice, or None for half of what is free
    min_tokens: int  # what one request needs at least


def num_blocks(request: PoolRequest, free_bytes: int) -> int:
    """Blocks of the KV pool: the caller's bytes, or half of what is free; no more than all requests can use.

    Raises `StartupError` when that is more than there is, or holds less than one request.
    """
    budget = free_bytes // 2 if request.wanted_bytes is None else request.wanted_bytes
    blocks_of_longest = -(-request.max_model_len // request.block_size)
    count = min(budget // request.bytes_per_block, request.max_num_seqs * blocks_of_longest)
    if request.wanted_bytes is not None and count * request.bytes_per_block > free_bytes:
        raise StartupError(
            f"kv_cache_memory is {_mb(request.wanted_bytes)}, but only {_mb(free_bytes)} are free after loading the "
            "model: lower it, or leave it out to use half of what is free"
        )
    needed = -(-request.min_tokens // request.block_size)
    if count < needed:
        source = f"half of the {_mb(free_bytes)} free" if request.wanted_bytes is None else "kv_cache_memory"
        raise StartupError(
            f"the KV pool would hold {count * request.block_size} tokens ({_mb(budget)}, {source}), but one request "
            f"needs {request.min_tokens} tokens ({_mb(needed * request.bytes_per_block)}): free memory, raise "
            "kv_cache_memory, or lower max_model_len"
        )
    return count


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
