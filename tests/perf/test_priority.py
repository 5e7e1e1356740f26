"""The compute process gives way: seen from outside, on a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = "from headstart.perf.priority import give_way; give_way(); give_way(); print('done', flush=True); input()"


def test_a_process_gives_way_and_goes_on() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "done\n"
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == min(own + 10, 19)
        process.communicate("\n")
    assert process.returncode == 0
