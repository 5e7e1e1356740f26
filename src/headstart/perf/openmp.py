"""How torch's OpenMP threads wait for each other. To be settled before torch is imported, which loads OpenMP.

By default they spin for about as long as it takes to lose a core to another process. On a machine whose cores are all
compute threads, the API process (or anybody) takes one now and then, and the others then spin out their time slices in
every parallel region: 512 tokens of prefill took 7.2 s instead of 1.3 s beside one busy process, a decode 1.4 s instead
of 0.08 s. Spinning briefly bridges the gaps between operations and costs nothing on a quiet machine (measured on 2
cores, interleaved; 1,000 turns are too few, as every wake-up then goes through the kernel).
"""

from __future__ import annotations

from collections.abc import MutableMapping

_SPIN_TURNS = "10000"
_OWN_CHOICE = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def spin_briefly(environment: MutableMapping[str, str]) -> None:
    """Set libgomp's `GOMP_SPINCOUNT`, unless whoever started this process has chosen how threads wait."""
    if not any(name in environment for name in _OWN_CHOICE):
        environment["GOMP_SPINCOUNT"] = _SPIN_TURNS
