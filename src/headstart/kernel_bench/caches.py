"""Sizes of the caches that this process' threads share, as Linux tells them; a guess where it does not."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_GUESS = {2: 512 << 10, 3: 32 << 20}


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Bytes. `l2`: of one core; `last`: of all caches of the last level together."""

    l2: int
    last: int


def cache_sizes(folder: Path = _CPUS, cpus: Iterable[int] | None = None) -> CacheSizes:
    """cpus: those that count; by default the ones that this process may run on."""
    if cpus is None:
        cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    found: dict[int, dict[str, int]] = {2: {}, 3: {}}  # level -> who shares it -> bytes
    for cpu in cpus:
        for index in (folder / f"cpu{cpu}" / "cache").glob("index*"):
            level, size, shared = (_read(index / name) for name in ("level", "size", "shared_cpu_list"))
            if level in ("2", "3") and (number := re.fullmatch(r"(\d+)([KMG]?)", size)):
                found[int(level)][shared or str(cpu)] = int(number[1]) * _UNITS[number[2]]
    l2 = min(found[2].values(), default=_GUESS[2])
    last = sum(found[3].values()) or sum(found[2].values()) or _GUESS[3]
    return CacheSizes(l2, last)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
