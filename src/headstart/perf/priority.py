"""The compute process's place beside others: it gives way at once, and takes longer turns when it runs.

Compute threads keep every core busy. What the API process has to do is little, but a token waits for it; so does a
client on the same machine. Linux lets a thread that wakes interrupt one whose turn is longer than its own (6.12 and
later: a turn that was asked for with `sched_setattr`), otherwise it may wait for the whole turn, some 3 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform

_NICENESS = 5
_TURN_NS = 20_000_000
_SYSCALLS = {"x86_64": 314, "aarch64": 274}  # sched_setattr


class _SchedAttr(ctypes.Structure):
    """struct sched_attr of sched_setattr(2), first version."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("sched_policy", ctypes.c_uint32),
        ("sched_flags", ctypes.c_uint64),
        ("sched_nice", ctypes.c_int32),
        ("sched_priority", ctypes.c_uint32),
        ("sched_runtime", ctypes.c_uint64),
        ("sched_deadline", ctypes.c_uint64),
        ("sched_period", ctypes.c_uint64),
    )


def give_way() -> None:
    """For this thread and those that it starts. Where the system does not allow it, nothing changes."""
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    number = _SYSCALLS.get(platform.machine())
    if platform.system() != "Linux" or number is None:
        return
    attributes = _SchedAttr(
        size=ctypes.sizeof(_SchedAttr), sched_nice=os.getpriority(os.PRIO_PROCESS, 0), sched_runtime=_TURN_NS
    )
    ctypes.CDLL(None, use_errno=True).syscall(number, 0, ctypes.byref(attributes), 0)
