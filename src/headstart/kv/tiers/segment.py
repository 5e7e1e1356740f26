"""A segment: one file of the disk tier. Owns the file format; knows nothing of which blocks are worth keeping.

    header   magic, format version, bytes of a block, fingerprint, CRC-32 of these: 64 bytes
    records  each: magic, CRC-32 of name and content, name, CRC-32 of these: 64 bytes; then the block's content

All records of a file have the same length, so a record that was cut off by the process' death is the last one, and is
seen by the file's length. Records that were torn in any other way (power loss, a bad disk) are seen by their checksums:
that of the record's head when the file is opened, that of the content whenever it is read. Integers are little-endian.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from headstart.core.chain import NAME_BYTES

HEAD_BYTES = 64
FINGERPRINT_BYTES = 32
_VERSION = 1
_MAGIC, _RECORD_MAGIC = b"HSKVSEG\n", b"HSKV"
_HEADER = struct.Struct(f"<8sIQ{FINGERPRINT_BYTES}s")
_RECORD = struct.Struct(f"<4sI{NAME_BYTES}s")
_CRC = struct.Struct("<I")


class SegmentError(Exception):
    """The file cannot be used; the message says why."""


class ForeignSegmentError(SegmentError):
    """It is whole, but holds another model's blocks, or those of another format or version."""


def segment_header(fingerprint: bytes, block_bytes: int) -> bytes:
    return _sealed(_HEADER.pack(_MAGIC, _VERSION, block_bytes, fingerprint))


def record_head(name: bytes, content: memoryview) -> bytes:
    return _sealed(_RECORD.pack(_RECORD_MAGIC, zlib.crc32(content, zlib.crc32(name)), name))


def is_segment(path: Path) -> bool:
    """Whether the file is one of ours at all, whatever its state."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


class Segment:
    """An open segment. Reading is safe from any thread. Raises `OSError` where the disk does."""

    def __init__(self, path: Path, fd: int, block_bytes: int) -> None:
        self.path = path
        self.block_bytes = block_bytes
        self._fd = fd

    @classmethod
    def create(cls, path: Path, fingerprint: bytes, block_bytes: int) -> Segment:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        segment = cls(path, fd, block_bytes)
        try:
            _write_all(fd, segment_header(fingerprint, block_bytes), 0)
        except OSError:
            segment.close()
            path.unlink(missing_ok=True)
            raise
        return segment

    @classmethod
    def open(cls, path: Path, fingerprint: bytes, block_bytes: int) -> Segment:
        """Raises `SegmentError` for a file whose header is damaged or foreign."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            head = os.pread(fd, HEAD_BYTES, 0)
            if not _is_sealed(head):
                raise SegmentError("its header is damaged")
            if head != segment_header(fingerprint, block_bytes):
                raise ForeignSegmentError("it was written for another model, format or version")
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd, block_bytes)

    @property
    def record_bytes(self) -> int:
        return HEAD_BYTES + self.block_bytes

    @property
    def num_whole_records(self) -> int:
        return max(0, os.fstat(self._fd).st_size - HEAD_BYTES) // self.record_bytes

    def drop_torn_end(self) -> bool:
        """Cut off a record that was not written to its end; False if there is none."""
        end = self._offset(self.num_whole_records)
        if os.fstat(self._fd).st_size == end:
            return False
        os.ftruncate(self._fd, end)
        return True

    def names(self) -> Iterator[bytes | None]:
        """Of the records, in order; None for one whose head is damaged."""
        for index in range(self.num_whole_records):
            head = os.pread(self._fd, HEAD_BYTES, self._offset(index))
            yield _name_in(head) if _is_sealed(head) else None

    def append(self, index: int, name: bytes, content: memoryview) -> None:
        """Write record `index`. Nobody may read it before this returns."""
        _write_all(self._fd, record_head(name, content), self._offset(index))
        _write_all(self._fd, content, self._offset(index) + HEAD_BYTES)

    def read(self, index: int, name: bytes, into: memoryview) -> bool:
        """The content of record `index`, `[block_bytes]`; False when it is not what was written under that name."""
        head = os.pread(self._fd, HEAD_BYTES, self._offset(index))
        if not _is_sealed(head) or _name_in(head) != name:
            return False
        done = 0
        while done < self.block_bytes:
            count = os.preadv(self._fd, [into[done:]], self._offset(index) + HEAD_BYTES + done)
            if count == 0:
                return False
            done += count
        return head == record_head(name, into)

    def close(self) -> None:
        os.close(self._fd)

    def _offset(self, index: int) -> int:
        return HEAD_BYTES + index * self.record_bytes


def _name_in(head: bytes) -> bytes | None:
    magic, _, name = _RECORD.unpack_from(head)
    return bytes(name) if magic == _RECORD_MAGIC else None


def _sealed(fields: bytes) -> bytes:
    padded = fields.ljust(HEAD_BYTES - _CRC.size, b"\0")
    return padded + _CRC.pack(zlib.crc32(padded))


def _is_sealed(head: bytes) -> bool:
    return len(head) == HEAD_BYTES and _CRC.unpack_from(head, HEAD_BYTES - _CRC.size)[0] == zlib.crc32(
        head[: -_CRC.size]
    )


def _write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while len(view):
        count = os.pwrite(fd, view, offset)
        view = view[count:]
        offset += count
