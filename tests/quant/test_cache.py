"""The cache of quantized matrices: what is found again, what is made anew, and what never stops a start."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import headstart
from headstart.hub import ModelError, ModelFiles
from headstart.ops.formats import QuantizedWeight
from headstart.quant.cache import CacheKey, QuantizedCache, cache_key, make_room
from headstart.quant.method import METHODS

KEY = CacheKey("checkpoint", "int4", "1.1")
NAMES = ["a.weight", "b.weight", "c.weight"]


def weights(seed: int = 0) -> dict[str, QuantizedWeight]:
    """One of each format, of sizes that end anywhere."""
    generator = torch.Generator().manual_seed(seed)
    made = zip(NAMES, METHODS.values(), ((3, 70), (7, 64), (5, 33)), strict=True)
    return {name: method.quantize(torch.randn(shape, generator=generator)) for name, method, shape in made}


def same(one: QuantizedWeight | None, other: QuantizedWeight) -> bool:
    if one is None or (one.format, one.shape) != (other.format, other.shape):
        return False
    pairs = [(one.codes, other.codes), (one.scales, other.scales)]
    if one.minimums is not None and other.minimums is not None:
        pairs.append((one.minimums, other.minimums))
    octets = [(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in pairs]
    return all(torch.equal(a, b) for a, b in octets)


def fill(folder: Path, key: CacheKey = KEY, seed: int = 0) -> Path:
    with QuantizedCache(key, NAMES, folder) as cache:
        for name, weight in weights(seed).items():
            cache.add(name, weight)
    return folder / key.file_name


def holds(folder: Path, key: CacheKey = KEY, seed: int = 0) -> bool:
    cache = QuantizedCache(key, NAMES, folder)
    return all(same(cache.read(name), weight) for name, weight in weights(seed).items())


def test_what_was_added_is_there_at_the_next_start(tmp_path: Path) -> None:
    with QuantizedCache(KEY, NAMES, tmp_path / "new" / "folder") as cache:
        assert not cache.is_warm
        assert cache.read(NAMES[0]) is None
        for name, weight in weights().items():
            cache.add(name, weight)
    again = QuantizedCache(KEY, NAMES, tmp_path / "new" / "folder")
    assert again.is_warm
    assert all(same(again.read(name), weight) for name, weight in weights().items())
    assert again.read("another.weight") is None
    again.add("another.weight", weights()[NAMES[0]])  # without effect
    assert [path.name for path in again_files(tmp_path / "new" / "folder")] == [KEY.file_name]


def again_files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name != ".lock"]


def test_the_file_is_one_of_safetensors_with_aligned_tensors(tmp_path: Path) -> None:
    path = fill(tmp_path)
    tensors = load_file(path)
    assert torch.equal(tensors["b.weight.codes"], weights()["b.weight"].codes)
    assert all(tensor.data_ptr() % 8 == 0 for name, tensor in tensors.items() if not name.endswith(".padding"))


@pytest.mark.parametrize(
    "key",
    [CacheKey("other", "int4", "1.1"), CacheKey("checkpoint", "int8", "1.1"), CacheKey("checkpoint", "int4", "1.2")],
)
def test_another_key_is_another_file(key: CacheKey, tmp_path: Path) -> None:
    fill(tmp_path)
    assert not QuantizedCache(key, NAMES, tmp_path).is_warm
    fill(tmp_path, key, seed=5)
    assert holds(tmp_path)
    assert holds(tmp_path, key, seed=5)


def model(folder: Path) -> ModelFiles:
    paths = [folder / "a.safetensors", folder / "b.safetensors", folder / "config.json"]
    for path in paths:
        path.write_bytes(b"0123456789")
    return ModelFiles("m", folder, "safetensors", tuple(paths[:2]), config=paths[2])


def test_a_checkpoint_that_changed_is_another(tmp_path: Path) -> None:
    files = model(tmp_path)
    key = cache_key(files, "int8", 1)
    assert key == cache_key(files, "int8", 1)
    assert cache_key(files, "int8", 2) != key
    assert cache_key(files, "int4", 1) != key
    for path in (files.weights[1], files.config):
        assert path is not None
        before = cache_key(files, "int8", 1)
        stat = path.stat()
        changed = path.with_name("changed")
        changed.write_bytes(b"012345678X")
        os.utime(changed, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # the same size and time, other bytes
        changed.replace(path)
        assert cache_key(files, "int8", 1) != before
    files.weights[0].unlink()
    with pytest.raises(ModelError, match=r"cannot read .*a\.safetensors"):
        cache_key(files, "int8", 1)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_damaged_file_is_removed_and_made_anew(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("cache")
    path = fill(folder)
    content = bytearray(path.read_bytes())
    kind = data.draw(st.sampled_from(["truncated", "flipped", "zeroed", "empty", "longer"]))
    start = data.draw(st.integers(0, len(content) - 1))
    if kind == "truncated":
        del content[start:]
    elif kind == "flipped":
        content[start] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "zeroed":
        content[start : start + 100] = bytes(len(content[start : start + 100]))
    elif kind == "empty":
        content.clear()
    else:
        content += b"more"
    path.write_bytes(content)
    with QuantizedCache(KEY, NAMES, folder) as cache:
        if cache.is_warm:  # what was hit says nothing: padding
            assert all(same(cache.read(name), weight) for name, weight in weights().items())
            return
        assert not path.exists()
        for name, weight in weights().items():
            cache.add(name, weight)
    assert holds(folder)


def test_damage_is_told_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = fill(tmp_path)
    path.write_bytes(path.read_bytes()[:-10])
    caplog.clear()
    QuantizedCache(KEY, NAMES, tmp_path)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(path) in record.getMessage()
    assert "made anew" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_a_file_under_the_wrong_name_is_not_believed(tmp_path: Path) -> None:
    other = CacheKey("other", "int4", "1.1")
    fill(tmp_path).rename(tmp_path / other.file_name)
    assert not QuantizedCache(other, NAMES, tmp_path).is_warm


def test_a_file_that_lacks_a_matrix_is_made_anew(tmp_path: Path) -> None:
    path = fill(tmp_path)
    assert not QuantizedCache(KEY, [*NAMES, "another.weight"], tmp_path).is_warm
    assert not path.exists()


def test_a_failed_load_leaves_nothing(tmp_path: Path) -> None:
    def load() -> None:
        with QuantizedCache(KEY, NAMES, tmp_path) as cache:
            cache.add(NAMES[0], weights()[NAMES[0]])
            raise ModelError("the next tensor is damaged")

    with pytest.raises(ModelError):
        load()
    assert again_files(tmp_path) == []
    with QuantizedCache(KEY, NAMES, tmp_path) as cache:
        cache.add(NAMES[0], weights()[NAMES[0]])  # not all that was named
    assert again_files(tmp_path) == []


def test_a_folder_that_cannot_be_made_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with QuantizedCache(KEY, NAMES, tmp_path / "file" / "folder") as cache:
        cache.add(NAMES[0], weights()[NAMES[0]])
        assert cache.read(NAMES[0]) is None
    (record,) = caplog.records
    assert "each start quantizes anew" in record.getMessage()


FULL_DISK = """
import resource, signal, sys, torch
from pathlib import Path
from headstart.quant.cache import CacheKey, QuantizedCache
from headstart.quant.method import METHODS
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # no file may grow beyond: writing fails as on a full disk
with QuantizedCache(CacheKey("checkpoint", "int4", "1.1"), ["a", "b"], Path(sys.argv[1])) as cache:
    for name in "ab":
        cache.add(name, METHODS["int8"].quantize(torch.randn(100, 320)))
print("went on")
"""


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(Path(headstart.__file__).parents[1])}
    command = [sys.executable, "-c", code, str(folder)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)


def test_a_full_disk_costs_a_warning_and_leaves_nothing(tmp_path: Path) -> None:
    done = run(FULL_DISK, tmp_path)
    assert done.stdout.strip() == "went on", done.stderr
    assert done.stderr.count("each start quantizes anew") == 1
    assert again_files(tmp_path) == []


KILLED = """
import os, signal, sys, torch
from pathlib import Path
from headstart.quant.cache import CacheKey, QuantizedCache
from headstart.quant.method import METHODS
with QuantizedCache(CacheKey("checkpoint", "int4", "1.1"), ["a", "b"], Path(sys.argv[1])) as cache:
    cache.add("a", METHODS["int8"].quantize(torch.randn(1000, 320)))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path) -> None:
    assert run(KILLED, tmp_path).returncode == -signal.SIGKILL
    (left,) = again_files(tmp_path)
    assert left.suffix == ".part"
    path = fill(tmp_path)
    assert again_files(tmp_path) == [path]
    assert holds(tmp_path)


def test_a_process_that_still_writes_keeps_its_part(tmp_path: Path) -> None:
    with QuantizedCache(KEY, NAMES, tmp_path) as slow:
        for name, weight in weights().items():
            slow.add(name, weight)
        fill(tmp_path, CacheKey("other", "int4", "1.1"))
        fill(tmp_path)  # the same file, and finished first
        assert holds(tmp_path)
    assert holds(tmp_path)
    assert len(again_files(tmp_path)) == 2


def _writer(folder: Path, barrier: object, outcome: object) -> None:
    barrier.wait()
    for _ in range(20):
        (folder / KEY.file_name).unlink(missing_ok=True)
        fill(folder)
        cache = QuantizedCache(KEY, NAMES, folder)
        if cache.is_warm and not all(same(cache.read(name), weight) for name, weight in weights().items()):
            outcome.put("other bytes")
    outcome.put("done")


def test_writers_and_readers_at_once_see_whole_files_only(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, outcome = context.Barrier(3), context.Queue()
    processes = [context.Process(target=_writer, args=(tmp_path, barrier, outcome)) for _ in range(3)]
    for process in processes:
        process.start()
    assert [outcome.get(timeout=100) for _ in processes] == ["done"] * 3
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert not list(tmp_path.glob("*.part"))


def test_a_reader_keeps_what_is_replaced_and_removed(tmp_path: Path) -> None:
    path = fill(tmp_path)
    cache = QuantizedCache(KEY, NAMES, tmp_path)
    path.unlink()
    fill(tmp_path, seed=9)
    assert all(same(cache.read(name), weight) for name, weight in weights().items())
    assert holds(tmp_path, seed=9)


@pytest.mark.parametrize(
    ("max_files", "max_bytes", "left"), [(2, 1000, {"new", "recent"}), (9, 250, {"new", "recent"}), (9, 10, {"new"})]
)
def test_the_files_used_longest_ago_make_room(max_files: int, max_bytes: int, left: set[str], tmp_path: Path) -> None:
    for age, name in enumerate(["recent", "older", "new", "oldest"]):
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(bytes(100))
        os.utime(path, (1_000_000 - age, 1_000_000 - age))
    make_room(tmp_path, keep=tmp_path / "new.safetensors", max_files=max_files, max_bytes=max_bytes)
    assert {path.stem for path in tmp_path.iterdir()} == left


def test_reading_counts_as_use(tmp_path: Path) -> None:
    path = fill(tmp_path)
    os.utime(path, (1, 1))
    assert holds(tmp_path)
    assert path.stat().st_mtime > 1
