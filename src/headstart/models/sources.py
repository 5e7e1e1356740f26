"""Where weights come from: safetensors shards or a GGUF file, both under Hugging Face's names.

Owns the file formats' reading and GGUF's dequantization (by the `gguf` package). Must not know layers or how weights
are used. Anything wrong becomes a one-line `ModelError` that names the tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headstart.hub import ModelError, ModelFiles
from headstart.hub.gguf_reader import GGUFFile, GGUFTensor, gguf_reader
from headstart.perf.checkpoint import check_gguf, check_safetensors
from headstart.perf.model_spec import ModelSpec
from headstart.perf.tensors import GGUF_ROPE_FACTORS, gguf_name


class WeightSource(Protocol):
    """Checked against the model's specification when made: every expected tensor is there, with its shape."""

    def num_bytes(self, name: str) -> int:
        """Bytes that the tensor takes on disk."""
        ...

    def read(self, name: str) -> Tensor:
        """The tensor on CPU, in a float dtype."""
        ...

    def rope_factors(self) -> Tensor | None:
        """Divisors of the rotary frequencies, `[D / 2]`, if the checkpoint has them."""
        ...


def open_source(files: ModelFiles, spec: ModelSpec) -> WeightSource:
    """The files' weights. Raises `ModelError` for missing, unexpected or misshapen tensors and unsupported types."""
    if files.format == "gguf":
        return GGUFSource(gguf_reader(files.weights[0]), spec)
    return SafetensorsSource(files.weights, spec)


class SafetensorsSource:
    """One or more safetensors files in Hugging Face's layout."""

    def __init__(self, paths: tuple[Path, ...], spec: ModelSpec) -> None:
        self._entries = check_safetensors(paths, spec)
        self._tensors: dict[str, tuple[Path, Any]] = {}  # name -> file, open handle
        for path in paths:
            handle = _open_safetensors(path)
            self._tensors |= dict.fromkeys(handle.keys(), (path, handle))

    def num_bytes(self, name: str) -> int:
        return self._entries[name].num_bytes

    def read(self, name: str) -> Tensor:
        path, handle = self._tensors[name]
        try:
            tensor: Tensor = handle.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelError(f"{path}: tensor {name} cannot be read: {error}") from None
        return tensor

    def rope_factors(self) -> Tensor | None:
        return None


class GGUFSource:
    """A GGUF file. Matrices are dequantized to float32; llama's q and k rows are put in half-split rotary order."""

    def __init__(self, file: GGUFFile, spec: ModelSpec) -> None:
        self._file = file
        self._spec = spec
        check_gguf(file, spec)

    def num_bytes(self, name: str) -> int:
        return self._file.tensors[gguf_name(name)].num_bytes

    def read(self, name: str) -> Tensor:
        values = _dequantized(self._file, self._file.tensors[gguf_name(name)])
        if self._spec.rope.interleaved and (".q_proj." in name or ".k_proj." in name):
            return _half_split(values, self._spec.head_dim)
        return values

    def rope_factors(self) -> Tensor | None:
        tensor = self._file.tensors.get(GGUF_ROPE_FACTORS)
        if tensor is None:
            return None
        factors = _dequantized(self._file, tensor)
        if not bool((factors.isfinite() & (factors > 0)).all()):
            raise ModelError(f"{self._file.path}: tensor {tensor.name} holds factors that are not positive")
        return factors


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is damaged: {error}; download it again") from None


def _dequantized(file: GGUFFile, tensor: GGUFTensor) -> Tensor:
    """float32, shaped as the tensor."""
    raw = np.frombuffer(tensor.data, dtype=np.uint8).reshape(*tensor.shape[:-1], -1)
    with np.errstate(all="ignore"):  # what is not finite is reported by name later
        values = dequantize(raw, GGMLQuantizationType(tensor.type_id))
    if not values.flags.writeable:
        values = values.copy()
    if values.shape != tensor.shape:
        raise ModelError(f"{file.path}: tensor {tensor.name} is damaged: {values.shape} values for {tensor.shape}")
    return torch.from_numpy(values)


def _half_split(rows: Tensor, head_dim: int) -> Tensor:
    """Undo llama.cpp's permutation: in each head, rows 2i and 2i+1 become i and i + D/2. rows: `[heads * D, ..]`."""
    pairs = rows.unflatten(0, (-1, head_dim // 2, 2))
    return pairs.transpose(1, 2).flatten(0, 2).contiguous()
