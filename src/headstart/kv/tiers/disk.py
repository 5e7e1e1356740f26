"""DiskTier: blocks in segment files in one folder, across restarts and crashes. Owns the folder and its size.

What is wrong with a file costs that file and one warning, never a start; what is wrong with the disk turns the tier
off, with one warning. Segments are given up whole, the one that was used longest ago first.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from headstart.kv.tiers.segment import HEAD_BYTES, ForeignSegmentError, Segment, SegmentError, is_segment

logger = logging.getLogger(__name__)

_SUFFIX, _LOCK = ".kvseg", "headstart.lock"
_SEGMENT_BYTES = 64 << 20
_LEAST_SEGMENTS = 8  # so that giving one up loses little


class TierError(Exception):
    """The folder cannot be used. One line, says what to do."""


@dataclass(slots=True, eq=False)
class _Held:
    """A segment and the names of the blocks in it that count."""

    segment: Segment
    num_records: int
    names: set[bytes] = field(default_factory=set)

    @property
    def num_bytes(self) -> int:
        return HEAD_BYTES + self.num_records * self.segment.record_bytes


class DiskTier:
    """Args: `fingerprint` [32 bytes] of all that blocks depend on; `block_bytes` of one block over all layers.

    `max_bytes` of all segments, those of other models included: they go first. `put` and `read` may be called from
    one thread each; `in` and `len` from any.

    Raises `TierError` for a folder that cannot be written to, is no folder, or belongs to a running server.
    """

    kind = "disk"

    def __init__(self, folder: Path, *, fingerprint: bytes, block_bytes: int, max_bytes: int) -> None:
        self._folder = folder
        self._fingerprint = fingerprint
        self._block_bytes = block_bytes
        self._max_bytes = max_bytes
        self._index: dict[bytes, tuple[_Held, int]] = {}
        self._held: OrderedDict[_Held, None] = OrderedDict()  # used longest ago first
        self._foreign: list[tuple[Path, int]] = []  # whole segments of other models, oldest first, and their bytes
        self._num_bytes = 0  # of all segments; kept up to date, for it is asked for after every step
        self._writing: _Held | None = None
        self._next_number = 0
        self._is_off = False
        self._has_warned_of_content = False
        if HEAD_BYTES + HEAD_BYTES + block_bytes > max_bytes:
            raise TierError(f"kv_disk_size is {max_bytes} bytes, but one KV block takes {block_bytes}: raise it")
        self._lock_fd = _lock(folder)
        try:
            self._scan()
        except OSError as error:
            os.close(self._lock_fd)
            raise TierError(f"kv_disk: cannot read the folder {folder}: {error.strerror}") from None

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, name: bytes) -> bool:
        return name in self._index

    @property
    def is_off(self) -> bool:
        """The disk failed: nothing is kept or found any more."""
        return self._is_off

    @property
    def num_bytes(self) -> int:
        """Of all segments."""
        return self._num_bytes

    def put(self, name: bytes, content: memoryview) -> None:
        """Keep a block. `content`: `[block_bytes]`."""
        if self._is_off or name in self._index:
            return
        try:
            held = self._room()
            index = held.num_records
            held.segment.append(index, name, content)
        except OSError as error:
            self._give_up(error)
            return
        held.num_records += 1
        self._num_bytes += held.segment.record_bytes
        held.names.add(name)
        self._index[name] = (held, index)

    def read(self, name: bytes, into: memoryview) -> bool:
        """Fetch a block; False when it is not there (any more), or is damaged: then it is forgotten."""
        place = self._index.get(name)
        if place is None or self._is_off:
            return False
        held, index = place
        try:
            if held.segment.read(index, name, into):
                if held in self._held:
                    self._held.move_to_end(held)
                return True
        except (OSError, ValueError) as error:
            if held in self._held:  # else it was given up while it was read
                self._give_up(error)
            return False
        lost = self._index.pop(name, None) is not None and held in self._held  # else it was given up meanwhile
        if lost and not self._has_warned_of_content:
            self._has_warned_of_content = True
            logger.warning("KV tier: %s is damaged; the blocks that are will be computed anew", held.segment.path)
        return False

    def close(self) -> None:
        for held in self._held:
            held.segment.close()
        self._held.clear()
        self._index.clear()
        self._num_bytes = 0
        self._is_off = True
        os.close(self._lock_fd)

    def _scan(self) -> None:
        paths = sorted(self._folder.glob(f"*{_SUFFIX}"), key=lambda path: (path.stat().st_mtime_ns, path.name))
        skipped: list[str] = []
        for path in paths:
            stem = path.stem
            self._next_number = max(self._next_number, int(stem) + 1 if stem.isdecimal() else 0)
            try:
                self._adopt(path)
            except ForeignSegmentError as error:
                self._count_foreign(path)
                skipped.append(f"{path.name} ({error})")
            except (SegmentError, OSError) as error:
                if is_segment(path):
                    self._count_foreign(path)
                skipped.append(f"{path.name} ({error})")
        if skipped:
            more = f" and {len(skipped) - 1} more" if len(skipped) > 1 else ""
            logger.warning("KV tier %s: skipped %s%s", self._folder, skipped[0], more)

    def _count_foreign(self, path: Path) -> None:
        size = path.stat().st_size
        self._foreign.append((path, size))
        self._num_bytes += size

    def _adopt(self, path: Path) -> None:
        """Take in what an earlier process left."""
        segment = Segment.open(path, self._fingerprint, self._block_bytes)
        names = list(segment.names())
        if segment.drop_torn_end():
            logger.warning("KV tier: the last block of %s was not written to its end; it is dropped", path)
        if None in names:
            logger.warning("KV tier: %s has damaged blocks; the others in it are used", path)
        held = _Held(segment, len(names))
        for index, name in enumerate(names):
            if name is not None:
                held.names.add(name)
                self._index[name] = (held, index)
        self._held[held] = None
        self._num_bytes += held.num_bytes

    def _room(self) -> _Held:
        """The segment that has room for one more record."""
        record_bytes = HEAD_BYTES + self._block_bytes
        most = max(HEAD_BYTES + record_bytes, min(_SEGMENT_BYTES, self._max_bytes // _LEAST_SEGMENTS))
        writing = self._writing
        if writing is not None and writing.num_bytes + record_bytes <= most:
            self._make_room(record_bytes)
            if writing in self._held:
                return writing
        self._make_room(HEAD_BYTES + record_bytes)
        path = self._folder / f"{self._next_number:010d}{_SUFFIX}"
        self._next_number += 1
        writing = _Held(Segment.create(path, self._fingerprint, self._block_bytes), 0)
        self._held[writing] = None
        self._num_bytes += writing.num_bytes
        self._writing = writing
        return writing

    def _make_room(self, num_bytes: int) -> None:
        while self.num_bytes + num_bytes > self._max_bytes and (self._foreign or self._held):
            if self._foreign:
                path, size = self._foreign.pop(0)
                self._num_bytes -= size
                path.unlink(missing_ok=True)
                continue
            held, _ = self._held.popitem(last=False)
            self._num_bytes -= held.num_bytes
            for name in held.names:
                if self._index.get(name, (None, 0))[0] is held:
                    del self._index[name]
            held.segment.path.unlink(missing_ok=True)
            held.segment.close()

    def _give_up(self, error: OSError | ValueError) -> None:
        if not self._is_off:
            self._is_off = True
            self._index.clear()
            reason = error.strerror if isinstance(error, OSError) else error
            logger.warning("KV tier %s: %s; serving goes on without it until the next start", self._folder, reason)


def _lock(folder: Path) -> int:
    """Make the folder ours until the descriptor is closed, or the process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise TierError(f"kv_disk: {folder} is no folder: name one, or a path that does not exist yet") from None
    except OSError as error:
        raise TierError(f"kv_disk: cannot write to the folder {folder}: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise TierError(f"kv_disk: the folder {folder} is used by another server: give each its own") from None
    return fd
