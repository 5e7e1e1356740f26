"""Reading the header of a safetensors file: which tensors it holds. Owns the container format, checked as strictly.

The format: https://github.com/huggingface/safetensors#format. Needs neither torch nor numpy, and reads no tensor.
It must not know what the names mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from headstart.hub.files import ModelError

_MAX_HEADER_BYTES = 100_000_000  # the reference implementation's limit
_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16}
_BITS |= {"U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as the header describes it."""

    dtype: str  # e.g. "BF16"
    shape: tuple[int, ...]
    num_bytes: int


def safetensors_header(path: Path) -> dict[str, TensorEntry]:
    """Name -> entry. Raises `ModelError` for a file that cannot be read, is truncated or contradicts itself."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
                raise _damaged(path, "its header is incomplete")
            header = json.loads(file.read(length))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, ModelError):
            raise
        raise _damaged(path, "its header is no JSON") from None
    if not isinstance(header, dict):
        raise _damaged(path, "its header is no JSON object")
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, value) for name, value in header.items()}
    end = 8 + length + sum(entry.num_bytes for entry in entries.values())
    if end != size:
        raise _damaged(path, f"its tensors end at byte {end} of {size} (truncated?)")
    return entries


def _entry(path: Path, name: str, value: Any) -> TensorEntry:
    if not isinstance(value, Mapping):
        raise _damaged(path, f"the entry of tensor {name} is no object")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise _damaged(path, f"the entry of tensor {name} is incomplete")
    num_bytes = offsets[1] - offsets[0]
    bits = _BITS.get(dtype)  # any other is refused where it is used
    if num_bytes < 0 or (bits is not None and num_bytes * 8 != math.prod(shape) * bits):
        raise _damaged(path, f"tensor {name} has {num_bytes} bytes for {dtype} {shape}")
    return TensorEntry(dtype, tuple(shape), num_bytes)


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _damaged(path: Path, what: str) -> ModelError:
    return ModelError(f"{path} is damaged: {what}; download it again")
