"""The linear layers under the address and undefined-behaviour sanitizers, over sizes that fill no tile."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import pytest

from tests.native.attention_driver import FLAGS, NATIVE, SANITIZE

SETS = ["portable", "avx2", "avx512", "amx"] if platform.machine() == "x86_64" else ["portable", "neon"]
BASE = ["g++", "-std=c++17", "-pthread", "-ffp-contract=off", "-Wno-psabi", f"-I{NATIVE}/src", *SANITIZE]


@pytest.mark.timeout(900)
def test_the_linear_layers_stay_inside_their_memory(tmp_path: Path) -> None:
    objects, builds = [], []
    have = "-DHS_HAVE_X86" if "avx2" in SETS else "-DHS_HAVE_NEON"
    for name in SETS:
        objects.append(str(tmp_path / f"{name}.o"))
        command = [*BASE, f"-DHS_ISA={name}", *FLAGS[name], "-c", f"{NATIVE}/src/kernels.cpp", "-o", objects[-1]]
        builds.append(subprocess.Popen(command))
    sources = [f"{NATIVE}/src/{name}.cpp" for name in ("operations", "dispatch", "threads", "weight")]
    assert [build.wait() for build in builds] == [0] * len(builds)
    program = tmp_path / "sizes"
    subprocess.run(
        [*BASE, have, f"{NATIVE}/tests/linear_sizes.cpp", *sources, *objects, "-o", str(program)], check=True
    )
    environment = {**os.environ, "UBSAN_OPTIONS": "print_stacktrace=1"}
    done = subprocess.run([program], check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[:4000]
    assert int(done.stdout.split()[0]) > 1000
