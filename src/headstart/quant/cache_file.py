"""One file of quantized matrices: a safetensors file whose metadata says what each matrix is, with checksums.

Owns the file's layout and its proof of being whole. Must not know where it lies or when it is valid. Tensors are named
`<matrix>.codes`, `.scales` and `.minimums`; each begins at a multiple of 64 bytes, if need be behind one of padding.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headstart.hub import ModelError
from headstart.hub.safetensors_header import safetensors_header
from headstart.ops.formats import QuantizedWeight, WeightFormat

_ALIGNMENT = 64
_PARTS = ("codes", "scales", "minimums")
_DTYPES = {
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
}
_MATRICES = "matrices"  # metadata: name -> [format, N, K, checksum]
_HEADER_BYTES = 4096
_HEADER_BYTES_A_MATRIX = 768  # three tensors, two paddings and an entry in the metadata, beside the names


class CacheFileError(ValueError):
    """A file that is damaged, or not the one that it should be. The message says what is wrong with it."""


class CacheReader:
    """A whole file, mapped. All of it is read once, to compare its checksums: that is fast beside quantizing."""

    def __init__(self, path: Path, identity: Mapping[str, str], names: Iterable[str]) -> None:
        """names: of what must be there. Raises `CacheFileError`, and `OSError` if the file cannot be read."""
        with path.open("rb"):  # tell an absent or forbidden file from a damaged one
            pass
        try:
            safetensors_header(path)
            self._file = _open(path)
            metadata = self._file.metadata() or {}
            if any(metadata.get(name) != value for name, value in identity.items()):
                raise CacheFileError("it is of another checkpoint or version")
            self._matrices: dict[str, list[Any]] = json.loads(metadata[_MATRICES])
            if missing := set(names) - set(self._matrices):
                raise CacheFileError(f"{min(missing)} is missing")
            for name in self._matrices:
                if _checksum(name, self._read(name)) != self._matrices[name][3]:
                    raise CacheFileError(f"the checksum of {name} is wrong")
        except CacheFileError:
            raise
        except (ModelError, SafetensorError, KeyError, ValueError, TypeError, IndexError, RuntimeError) as error:
            raise CacheFileError(f"it is damaged ({error})") from None

    def read(self, name: str) -> QuantizedWeight | None:
        """The matrix, mapped; None if it is not in the file."""
        return self._read(name) if name in self._matrices else None

    def _read(self, name: str) -> QuantizedWeight:
        kind, num_rows, num_columns, _ = self._matrices[name]
        weight_format = WeightFormat(kind)
        names = _PARTS if weight_format is WeightFormat.Q4_1 else _PARTS[:2]
        parts = [self._file.get_tensor(f"{name}.{part}") for part in names]
        return QuantizedWeight(weight_format, (int(num_rows), int(num_columns)), *parts)


class CacheWriter:
    """Writes matrices as they come, to a file beside the final one. The header's place is kept free until the end.

    The file is locked while it is written: a part that nobody holds was left by a process that was killed.
    """

    def __init__(self, part: Path, identity: Mapping[str, str], names: Sequence[str]) -> None:
        """names: of all matrices that may be added. Raises `OSError`."""
        self._part = part
        self._identity = dict(identity)
        self._matrices: dict[str, list[Any]] = {}
        self._header: dict[str, Any] = {}
        self._end = 0
        identity_bytes = 2 * len(json.dumps(self._identity))
        needed = _HEADER_BYTES + identity_bytes + sum(_HEADER_BYTES_A_MATRIX + 8 * len(name) for name in names)
        self._body = -(-needed // _ALIGNMENT) * _ALIGNMENT
        self._file = part.open("xb")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._file.seek(self._body)

    @staticmethod
    def is_alive(part: Path) -> bool:
        """Whether some process is still writing it."""
        try:
            with part.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False

    @property
    def names(self) -> set[str]:
        """Of what was added."""
        return set(self._matrices)

    @property
    def num_bytes(self) -> int:
        return self._body + self._end

    def add(self, name: str, weight: QuantizedWeight) -> None:
        """Raises `OSError`, such as for a full disk."""
        assert name not in self._matrices, name
        for label, part in _parts(weight):
            self._write(f"{name}.{label}", part)
        self._matrices[name] = [str(weight.format), *weight.shape, _checksum(name, weight)]

    def finish(self, path: Path) -> None:
        """Give the file its header and its name. Raises `OSError`."""
        metadata = self._identity | {_MATRICES: json.dumps(self._matrices, separators=(",", ":"))}
        header = json.dumps({"__metadata__": metadata} | self._header, separators=(",", ":")).encode()
        room = self._body - 8
        assert len(header) <= room, (len(header), room)
        self._file.seek(0)
        self._file.write(room.to_bytes(8, "little") + header.ljust(room))
        self._file.flush()  # no fsync: what a crash of the machine leaves behind does not pass the checksums
        self._part.replace(path)
        self._file.close()

    def discard(self) -> None:
        """Leave nothing behind."""
        with contextlib.suppress(OSError):
            self._part.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._file.close()

    def _write(self, name: str, part: Tensor) -> None:
        data = _bytes(part)
        self._header[name] = self._entry(_DTYPES[part.dtype], list(part.shape), data.nbytes)
        self._file.write(data)
        padding = -self._end % _ALIGNMENT
        if padding:
            self._header[f"{name}.padding"] = self._entry("U8", [padding], padding)
            self._file.write(bytes(padding))

    def _entry(self, dtype: str, shape: list[int], num_bytes: int) -> dict[str, Any]:
        begin, self._end = self._end, self._end + num_bytes
        return {"dtype": dtype, "shape": shape, "data_offsets": [begin, self._end]}


def _open(path: Path) -> Any:
    return safe_open(path, framework="pt")


def _parts(weight: QuantizedWeight) -> Iterator[tuple[str, Tensor]]:
    for label in _PARTS:
        part = getattr(weight, label)
        if part is not None:
            yield label, part


def _bytes(part: Tensor) -> memoryview:
    return part.contiguous().view(torch.uint8).numpy().data.cast("B")


def _checksum(name: str, weight: QuantizedWeight) -> int:
    """Over the bytes and what says how to read them, which a damaged header would say otherwise."""
    shapes = [(label, str(part.dtype), tuple(part.shape)) for label, part in _parts(weight)]
    value = zlib.crc32(repr((name, str(weight.format), weight.shape, shapes)).encode())
    for _, part in _parts(weight):
        value = zlib.crc32(_bytes(part), value)
    return value
