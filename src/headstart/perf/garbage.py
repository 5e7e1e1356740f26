"""The garbage collector beside a stream of tokens. Owns when it looks at what.

A full collection walks every object: 50 ms in the API process, 200 ms where torch is loaded, and all streams stand
still. What a process holds when it is ready stays until it ends, so it is taken out of the collector's sight; what
serving leaves behind is freed by reference counts, but for few cycles, which can wait.
"""

from __future__ import annotations

import gc

# Allocations between young collections, young ones between middle ones, middle ones between full ones.
_THRESHOLDS = (20_000, 20, 50)


def freeze_garbage_collector() -> None:
    """Collect once, look no more at what is left, and collect seldom from now on. Cheap when called again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
