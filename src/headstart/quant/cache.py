"""Quantized matrices kept on disk, so that only the first start with a checkpoint quantizes it.

Owns the folder `quantized` of the user's cache: one safetensors file a checkpoint, method and version. A file is
written beside its place and renamed when it is whole, so that readers see all of it or nothing; two that write the same
file at once both succeed, and the last one stays. Whatever is wrong with a file, or with the disk, costs time and a
line in the log, never a start. Must not know what is quantized, or how.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headstart.hub import ModelError, ModelFiles
from headstart.hub.cache import cache_folder
from headstart.ops.formats import QuantizedWeight
from headstart.quant.cache_file import CacheFileError, CacheReader, CacheWriter

logger = logging.getLogger(__name__)

LAYOUT_VERSION = 1  # of the files here; a method's own version says which codes come out
MAX_FILES = 8
MAX_BYTES = 64 << 30  # of all files together
_SUFFIX, _PART_SUFFIX = ".safetensors", ".part"


@dataclass(frozen=True, slots=True)
class CacheKey:
    """What makes codes what they are. Another key is another file."""

    checkpoint: str
    method: str
    version: str

    @property
    def file_name(self) -> str:
        digest = hashlib.sha256("\n".join((self.checkpoint, self.method, self.version)).encode()).hexdigest()
        return f"{self.method}-{digest[:32]}{_SUFFIX}"


def cache_key(files: ModelFiles, method: str, version: int) -> CacheKey:
    """The key of what a method, at a version of it, makes of a checkpoint.

    The identity of a checkpoint is its files' names, sizes and times of change.

    `st_ctime_ns` is among them: no program can set it, so that also a file that was changed and then given back its old
    time is another. Moving a checkpoint keeps the key. Raises `ModelError` for a file that cannot be looked at.
    """
    facts = []
    for path in (*files.weights, *((files.config,) if files.config is not None else ())):
        try:
            stat = path.stat()
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from None
        facts.append([path.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns])
    return CacheKey(json.dumps(facts), method, f"{LAYOUT_VERSION}.{version}")


class QuantizedCache:
    """The matrices of one key: those of an earlier start, or those of this one, to be kept for the next.

    A context manager: what was added is kept if it is all that was named and the block ends without an error. Nothing
    fails because of the cache.
    """

    def __init__(self, key: CacheKey, names: Iterable[str], folder: Path | None = None) -> None:
        """names: of the matrices that will be asked for. folder: by default the user's cache."""
        self._key = key
        self._names = tuple(names)
        self._path: Path | None = None  # None: nothing is kept
        self._reader: CacheReader | None = None
        self._writer: CacheWriter | None = None
        try:
            folder = (folder or cache_folder() / "quantized").absolute()
            self._path = folder / key.file_name
            self._reader = _open(self._path, key, self._names)
        except (OSError, ModelError) as error:
            self._give_up(error)

    @property
    def is_warm(self) -> bool:
        """Whether the matrices of an earlier start are there."""
        return self._reader is not None

    def read(self, name: str) -> QuantizedWeight | None:
        """The matrix as it was added, mapped from the file; None if it is not there."""
        return None if self._reader is None else self._reader.read(name)

    def add(self, name: str, weight: QuantizedWeight) -> None:
        """Keep a matrix. Without effect where an earlier start has left some, or once the disk is full."""
        if self._path is None or self._reader is not None:
            return
        try:
            if self._writer is None:
                self._writer = _new_writer(self._path, self._key, self._names)
            self._writer.add(name, weight)
        except OSError as error:
            self._give_up(error)

    def __enter__(self) -> QuantizedCache:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._writer is None or self._path is None:
            return
        if kind is not None or self._writer.names != set(self._names):
            self._writer.discard()
            return
        try:
            self._writer.finish(self._path)
        except OSError as failed:
            self._give_up(failed)
        else:
            logger.info("quantized weights are kept in %s (%d MB)", self._path, self._writer.num_bytes // 1_000_000)
            make_room(self._path.parent, keep=self._path)

    def _give_up(self, error: OSError | ModelError) -> None:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        where = self._path or "the user's cache"
        logger.warning("quantized weights cannot be kept in %s (%s): each start quantizes anew", where, reason)
        if self._writer is not None:
            self._writer.discard()
        self._path = self._writer = None


def make_room(folder: Path, *, keep: Path, max_files: int = MAX_FILES, max_bytes: int = MAX_BYTES) -> None:
    """Remove the files that were used longest ago, until the rest is within the limits. `keep` always stays."""
    found = []
    for path in folder.glob("*" + _SUFFIX):
        with contextlib.suppress(OSError):  # another process has removed it
            stat = path.stat()
            found.append((path == keep, stat.st_mtime_ns, stat.st_size, path))
    found.sort(reverse=True)  # `keep`, then the most recently used
    total = 0
    for index, (_, _, size, path) in enumerate(found):
        total += size
        if index > 0 and (index >= max_files or total > max_bytes):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)  # who has it mapped keeps it


def _open(path: Path, key: CacheKey, names: Iterable[str]) -> CacheReader | None:
    """A whole file of this key, or None; one that is damaged or of another key is removed. Raises `OSError`."""
    try:
        reader = CacheReader(path, _identity(key), names)
    except FileNotFoundError:
        return None
    except CacheFileError as error:
        logger.warning("%s is removed and made anew: %s", path, error)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # the time of last use
    return reader


def _new_writer(path: Path, key: CacheKey, names: Sequence[str]) -> CacheWriter:
    """Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        for leftover in path.parent.glob("*" + _PART_SUFFIX):
            if not CacheWriter.is_alive(leftover):  # its writer was killed
                leftover.unlink(missing_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.{os.urandom(4).hex()}{_PART_SUFFIX}")
        return CacheWriter(part, _identity(key), names)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Against processes that look for abandoned parts between the making of a part and its own lock."""
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _identity(key: CacheKey) -> dict[str, str]:
    return {"checkpoint": key.checkpoint, "method": key.method, "version": key.version}
