"""The disk tier's files: what is kept comes back to the bit or not at all, whatever happened to them in between."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.kv.tiers import DiskTier, RamTier, TierError
from headstart.kv.tiers.segment import HEAD_BYTES

BLOCK = 256
PRINT, OTHER = b"p" * 32, b"o" * 32


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def content(number: int) -> memoryview:
    return memoryview(random.Random(number).randbytes(BLOCK))


def tier(folder: Path, *, fingerprint: bytes = PRINT, max_bytes: int = 1 << 20) -> DiskTier:
    return DiskTier(folder, fingerprint=fingerprint, block_bytes=BLOCK, max_bytes=max_bytes)


def fetch(of: DiskTier | RamTier, number: int) -> bytes | None:
    into = bytearray(BLOCK)
    return bytes(into) if of.read(name(number), memoryview(into)) else None


def fill(of: DiskTier | RamTier, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        of.put(name(number), content(number))


def test_blocks_survive_a_restart(tmp_path: Path) -> None:
    first = tier(tmp_path / "made" / "here")
    fill(first, 20)
    assert (len(first), fetch(first, 7)) == (20, bytes(content(7)))
    assert fetch(first, 99) is None
    first.close()
    second = tier(tmp_path / "made" / "here")
    assert [fetch(second, number) for number in range(20)] == [bytes(content(number)) for number in range(20)]
    second.close()


def test_it_never_grows_beyond_its_size_and_keeps_what_is_used(tmp_path: Path) -> None:
    limit = 40 * (BLOCK + HEAD_BYTES)
    held = tier(tmp_path, max_bytes=limit)
    for number in range(400):
        fill(held, 1, number)
        assert held.num_bytes <= limit
        assert sum(path.stat().st_size for path in tmp_path.glob("*.kvseg")) <= limit
        assert fetch(held, 0) is not None, "it is asked for all the time"
    assert name(399) in held
    assert len(held) > 20
    held.close()


def test_the_folder_of_a_running_server_is_refused(tmp_path: Path) -> None:
    held = tier(tmp_path)
    with pytest.raises(TierError, match="used by another server"):
        tier(tmp_path)
    held.close()
    tier(tmp_path).close()


def test_what_is_no_folder_or_too_small_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(TierError, match="no folder"):
        tier(tmp_path / "file")
    with pytest.raises(TierError, match="cannot write"):
        tier(tmp_path / "file" / "below")
    with pytest.raises(TierError, match="raise it"):
        tier(tmp_path, max_bytes=300)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_turns_it_off_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The kernel's own error: a limit on the size of files, in a process of its own."""
    code = f"""
import logging, resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
logging.basicConfig(level=logging.WARNING)
sys.path[:0] = {sys.path!r}
from pathlib import Path
from tests.kv.tiers.test_disk import fill, fetch, tier
held = tier(Path({str(tmp_path)!r}))
fill(held, 3)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
fill(held, 50, 3)
assert held.is_off and len(held) == 0 and fetch(held, 0) is None
held.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("WARNING") == 1
    assert "serving goes on without it" in done.stderr
    again = tier(tmp_path)
    assert fetch(again, 2) == bytes(content(2))
    again.close()


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_damage_never_yields_a_wrong_block(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Flipped bits, zeroed ranges, cut files, swapped records: right or missing, never wrong."""
    folder = tmp_path_factory.mktemp("tier")
    first = tier(folder, max_bytes=24 * (BLOCK + HEAD_BYTES))
    fill(first, 16)
    first.close()
    paths = sorted(folder.glob("*.kvseg"))
    for _ in range(data.draw(st.integers(1, 4))):
        path = data.draw(st.sampled_from(paths))
        raw = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, max(0, len(raw) - 1)))
        match data.draw(st.sampled_from(["flip", "zero", "cut", "swap"])):
            case "flip" if raw:
                raw[at] ^= 1 << data.draw(st.integers(0, 7))
            case "zero":
                raw[at : at + 100] = bytes(len(raw[at : at + 100]))
            case "cut":
                del raw[at:]
            case "swap":
                size = BLOCK + HEAD_BYTES
                one, two = raw[HEAD_BYTES : HEAD_BYTES + size], raw[HEAD_BYTES + size : HEAD_BYTES + 2 * size]
                if len(two) == size:
                    raw[HEAD_BYTES : HEAD_BYTES + 2 * size] = two + one
        path.write_bytes(raw)
    logging.disable(logging.WARNING)
    try:
        second = tier(folder)
        for number in range(16):
            assert fetch(second, number) in (None, bytes(content(number)))
        fill(second, 16, 100)
        assert fetch(second, 107) == bytes(content(107))
        second.close()
    finally:
        logging.disable(logging.NOTSET)


def test_foreign_files_are_named_once_and_go_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = tier(tmp_path, fingerprint=OTHER)
    fill(other, 3)
    other.close()
    (tmp_path / "notes.kvseg").write_text("nothing of ours")
    limit = 12 * (BLOCK + HEAD_BYTES)
    mine = tier(tmp_path, max_bytes=limit)
    assert len(caplog.records) == 1
    assert "0000000000.kvseg" in caplog.text
    assert "another model" in caplog.text
    fill(mine, 30)
    assert mine.num_bytes <= limit
    assert not (tmp_path / "0000000000.kvseg").exists()
    assert (tmp_path / "notes.kvseg").read_text() == "nothing of ours"
    mine.close()


def test_a_torn_end_is_named_and_dropped_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = tier(tmp_path)
    fill(first, 3)
    first.close()
    (path,) = tmp_path.glob("*.kvseg")
    os.truncate(path, path.stat().st_size - 10)
    second = tier(tmp_path)
    assert (len(second), fetch(second, 1)) == (2, bytes(content(1)))
    second.close()
    assert str(path) in caplog.text
    caplog.clear()
    tier(tmp_path).close()
    assert not caplog.records


def test_killed_in_mid_write_twenty_times(tmp_path: Path) -> None:
    """Each child writes until it is killed; what the next one finds is right, and most of it is there."""
    code = f"""
import itertools, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from tests.kv.tiers.test_disk import fetch, content, fill, name, tier
held = tier(Path({str(tmp_path)!r}), max_bytes=1 << 28)
found = [number for number in range(20_000) if name(number) in held]
assert all(fetch(held, number) == bytes(content(number)) for number in found)
print(len(found), flush=True)
for number in itertools.count():
    fill(held, 1, number)
"""
    counts = []
    rng = random.Random(3)
    for _ in range(20):
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        counts.append(int(child.stdout.readline()))
        before = sum(path.stat().st_size for path in tmp_path.glob("*.kvseg"))
        goal = before + rng.randrange(1, 40_000)
        while child.poll() is None and sum(path.stat().st_size for path in tmp_path.glob("*.kvseg")) < goal:
            pass
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
    assert counts == sorted(counts)
    assert counts[-1] > 100


def test_ram_gives_what_was_used_longest_ago_to_the_next(tmp_path: Path) -> None:
    below = tier(tmp_path)
    ram = RamTier(4 * BLOCK, below.put)
    fill(ram, 4)
    assert fetch(ram, 0) == bytes(content(0))
    fill(ram, 2, 4)
    assert [name(number) in ram for number in range(6)] == [True, False, False, True, True, True]
    assert fetch(below, 1) == bytes(content(1))
    ram.close()
    assert len(below) == 6
    assert ram.num_bytes == len(ram) == 0
    below.close()
