from __future__ import annotations

import os
import subprocess
import sys

import pytest

from headstart.perf.openmp import spin_briefly


@pytest.mark.parametrize("chosen", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}])
def test_a_choice_from_outside_stands(chosen: dict[str, str]) -> None:
    environment = dict(chosen)
    spin_briefly(environment)
    assert environment == chosen


def test_the_engine_process_settles_it_before_torch_loads_openmp() -> None:
    """`replica` must not have imported torch by the time it is set: libgomp reads its environment once."""
    script = (
        "import builtins, os, sys\n"
        "real = builtins.__import__\n"
        "def watch(name, *rest):\n"
        "    if name == 'torch' and 'torch' not in sys.modules: print(os.environ.get('GOMP_SPINCOUNT'))\n"
        "    return real(name, *rest)\n"
        "builtins.__import__ = watch\n"
        "import headstart.replica\n"
    )
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    found = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split()[0] == "10000"
