"""The garbage collector once a process is ready. In a fresh interpreter: it has only one."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc, time
from headstart.perf.garbage import freeze_garbage_collector
held = [[number] for number in range(1_000_000)]

def full() -> float:
    started = time.perf_counter()
    gc.collect()
    return time.perf_counter() - started

before = min(full(), full(), full())
freeze_garbage_collector()
after = min(full(), full(), full())
assert gc.get_freeze_count() > 1_000_000
assert gc.get_threshold()[0] >= 10_000 and gc.get_threshold()[2] >= 20
cycle = [[]]
cycle[0].append(cycle)
del cycle
assert gc.collect() >= 2, "what serving leaves behind is still found"
assert after < before / 20, (before, after)
"""


def test_what_is_held_when_ready_is_never_looked_at_again() -> None:
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
