"""Where weights come from: safetensors shards or a GGUF file, both under Hugging Face's names.

Owns the file formats' reading and GGUF's dequantization (by the `gguf` package). Must not know layers or how weights
are used. Anything wrong becomes a one-line `ModelError` that names the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
from headstart.models.tensors import GGUF_ROPE_FACTORS, LM_HEAD, expected_tensors, gguf_name
from headstart.perf.model_spec import ModelSpec

_SAFETENSORS_DTYPES = ("F32", "F16", "BF16")
_GGUF_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


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
        self._tensors: dict[str, tuple[Path, Any]] = {}  # name -> file, open handle
        shapes: dict[str, tuple[int, ...]] = {}
        self._num_bytes: dict[str, int] = {}
        for path in paths:
            handle = _open_safetensors(path)
            for name in handle.keys():  # noqa: SIM118 (no mapping)
                if name in self._tensors:
                    raise ModelError(f"{path}: tensor {name} is in {self._tensors[name][0].name} too")
                self._tensors[name] = (path, handle)
                view = handle.get_slice(name)
                shapes[name] = tuple(view.get_shape())
                self._num_bytes[name] = int(np.prod(shapes[name], dtype=np.int64)) * _item_size(view.get_dtype())
                if view.get_dtype() not in _SAFETENSORS_DTYPES and name in expected_tensors(spec):
                    kinds = ", ".join(_SAFETENSORS_DTYPES)
                    raise ModelError(
                        f"{path}: tensor {name} has the unsupported dtype {view.get_dtype()} ({kinds} are)"
                    )
        unused = {name for name in shapes if name.endswith(".rotary_emb.inv_freq")}
        if spec.tie_word_embeddings:
            unused.add(LM_HEAD)  # some checkpoints hold the tied matrix twice
        _check_shapes(shapes, expected_tensors(spec), unused, str(paths[0] if len(paths) == 1 else paths[0].parent))

    def num_bytes(self, name: str) -> int:
        return self._num_bytes[name]

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
        expected = {gguf_name(name): shape for name, shape in expected_tensors(spec).items()}
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        _check_shapes(shapes, expected, {GGUF_ROPE_FACTORS}, str(file.path))
        for name in expected:
            _check_gguf_type(file, file.tensors[name])

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
        _check_gguf_type(self._file, tensor)
        if tensor.shape != (self._spec.head_dim // 2,):
            raise ModelError(
                f"{self._file.path}: tensor {tensor.name} has shape {list(tensor.shape)}, "
                f"expected {[self._spec.head_dim // 2]}"
            )
        factors = _dequantized(self._file, tensor)
        if not bool((factors.isfinite() & (factors > 0)).all()):
            raise ModelError(f"{self._file.path}: tensor {tensor.name} holds factors that are not positive")
        return factors


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is damaged: {error}; download it again") from None


def _item_size(dtype: str) -> int:
    digits = "".join(c for c in dtype if c.isdigit())[:2]
    return max(int(digits or 8) // 8, 1)


def _check_shapes(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], unused: Iterable[str], where: str
) -> None:
    missing = [name for name in expected if name not in found]
    if missing:
        raise ModelError(f"{where}: tensor {missing[0]} is missing{_and_more(missing)}")
    extra = sorted(set(found) - set(expected) - set(unused))
    if extra:
        raise ModelError(f"{where}: unexpected tensor {extra[0]}{_and_more(extra)}: this is another kind of model")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelError(f"{where}: tensor {name} has shape {list(found[name])}, expected {list(shape)}")


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _check_gguf_type(file: GGUFFile, tensor: GGUFTensor) -> None:
    if tensor.type_name not in _GGUF_TYPES:
        kinds = ", ".join(_GGUF_TYPES)
        raise ModelError(f"{file.path}: tensor {tensor.name} has the unsupported type {tensor.type_name} ({kinds} are)")


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
