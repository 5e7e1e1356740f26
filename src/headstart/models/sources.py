"""Where weights come from: safetensors shards or a GGUF file, both under Hugging Face's names.

Owns the reading of files and the order of rows. What quantized numbers mean is `headstart.quant`'s. Must not know
layers or how weights are used. Anything wrong becomes a one-line `ModelError` that names the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headstart.hub import ModelError, ModelFiles
from headstart.hub.gguf_reader import GGUFFile, GGUFTensor, gguf_reader
from headstart.ops.formats import QuantizedWeight, WeightFormat
from headstart.perf.checkpoint import check_gguf, check_safetensors, quantized_matrices
from headstart.perf.model_spec import ModelSpec
from headstart.perf.quantization_spec import QuantizationSpec, read_quantization
from headstart.perf.tensors import GGUF_ROPE_FACTORS, expected_tensors, gguf_name
from headstart.quant.checkpoints import checkpoint_format, decode
from headstart.quant.method import QuantizationError
from headstart.quant.report import Report
from headstart.quant.requantize import GGUF_FORMATS, ROUNDED_GGUF_TYPES, gguf_floats, gguf_weight


class WeightSource(Protocol):
    """Checked against the model's specification when made: every expected tensor is there, with its shape."""

    @property
    def formats(self) -> Mapping[str, WeightFormat]:
        """The matrices that are quantized on disk, each with the format that `read_matrix` gives."""
        ...

    def num_bytes(self, name: str) -> int:
        """Bytes that the tensor takes on disk."""
        ...

    def read(self, name: str) -> Tensor:
        """The tensor on CPU, in a float dtype."""
        ...

    def read_matrix(self, name: str) -> Tensor | QuantizedWeight:
        """The matrix on CPU as the checkpoint holds it, in codes or in a float dtype."""
        ...

    def is_rounded(self, name: str) -> bool:
        """Whether `read_matrix` rounds what the checkpoint holds, which takes a while."""
        ...

    def rope_factors(self) -> Tensor | None:
        """Divisors of the rotary frequencies, `[D / 2]`, if the checkpoint has them."""
        ...


def open_source(files: ModelFiles, spec: ModelSpec) -> WeightSource:
    """The files' weights. Raises `ModelError` for missing, unexpected or misshapen tensors and unsupported types."""
    if files.format == "gguf":
        return GGUFSource(gguf_reader(files.weights[0]), spec)
    return SafetensorsSource(files.weights, spec, read_quantization(files))


class SafetensorsSource:
    """One or more safetensors files in Hugging Face's layout. quantization: the checkpoint's own."""

    def __init__(self, paths: tuple[Path, ...], spec: ModelSpec, quantization: QuantizationSpec | None = None) -> None:
        self._entries = check_safetensors(paths, spec, quantization)
        self._quantization = quantization
        self._matrices = quantized_matrices(self._entries, spec, quantization, str(paths[0].parent))
        self._shapes = expected_tensors(spec)
        self.formats: Mapping[str, WeightFormat] = {}
        if quantization is not None:
            self.formats = dict.fromkeys(self._matrices, checkpoint_format(quantization))
        self._report = Report()
        self._tensors: dict[str, tuple[Path, Any]] = {}  # name -> file, open handle
        for path in paths:
            handle = _open_safetensors(path)
            self._tensors |= dict.fromkeys(handle.keys(), (path, handle))

    def num_bytes(self, name: str) -> int:
        return sum(self._entries[part].num_bytes for part in self._parts(name).values())

    def read(self, name: str) -> Tensor:
        matrix = self.read_matrix(name)
        return matrix.dequantize() if isinstance(matrix, QuantizedWeight) else matrix

    def read_matrix(self, name: str) -> Tensor | QuantizedWeight:
        parts = {part: self._read(full) for part, full in self._parts(name).items()}
        if name not in self._matrices:
            return parts["weight"]
        assert self._quantization is not None
        num_rows, num_columns = self._shapes[name]
        with _naming(self._tensors[next(iter(self._parts(name).values()))][0], name):
            return decode(self._quantization, (num_rows, num_columns), parts, self._report)

    def is_rounded(self, name: str) -> bool:
        return name in self._matrices and self._quantization is not None and self._quantization.block is not None

    def rope_factors(self) -> Tensor | None:
        return None

    def _parts(self, name: str) -> dict[str, str]:
        """What part it is of the tensor or matrix -> its name in the files."""
        if name not in self._matrices:
            return {"weight": name}
        matrix = self._matrices[name]
        names = {part: f"{matrix.module}.{part}" for part in matrix.present(self._entries)}
        # A bias that the model has is a tensor of its own.
        return {part: full for part, full in names.items() if full == name or full not in self._shapes}

    def _read(self, name: str) -> Tensor:
        path, handle = self._tensors[name]
        try:
            tensor: Tensor = handle.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelError(f"{path}: tensor {name} cannot be read: {error}") from None
        return tensor


class GGUFSource:
    """A GGUF file. llama's q and k rows are put in half-split rotary order."""

    def __init__(self, file: GGUFFile, spec: ModelSpec) -> None:
        self._file = file
        self._spec = spec
        self._report = Report()
        check_gguf(file, spec)
        matrices = [name for name, shape in expected_tensors(spec).items() if len(shape) == 2]
        kinds = {name: self._tensor(name).type_name for name in matrices}
        self.formats: Mapping[str, WeightFormat] = {
            name: GGUF_FORMATS[kind] for name, kind in kinds.items() if kind in GGUF_FORMATS
        }

    def num_bytes(self, name: str) -> int:
        return self._tensor(name).num_bytes

    def read(self, name: str) -> Tensor:
        values = gguf_floats(self._tensor(name))
        order = self._row_order(name)
        return values if order is None else values[order]

    def read_matrix(self, name: str) -> Tensor | QuantizedWeight:
        with _naming(self._file.path, self._tensor(name).name):
            weight = gguf_weight(self._tensor(name), self._report)
        if weight is None:
            return self.read(name)
        order = self._row_order(name)
        return weight if order is None else weight.rows(order)

    def is_rounded(self, name: str) -> bool:
        return self._tensor(name).type_name in ROUNDED_GGUF_TYPES

    def rope_factors(self) -> Tensor | None:
        tensor = self._file.tensors.get(GGUF_ROPE_FACTORS)
        if tensor is None:
            return None
        factors = gguf_floats(tensor)
        if not bool((factors.isfinite() & (factors > 0)).all()):
            raise ModelError(f"{self._file.path}: tensor {tensor.name} holds factors that are not positive")
        return factors

    def _tensor(self, name: str) -> GGUFTensor:
        return self._file.tensors[gguf_name(name)]

    def _row_order(self, name: str) -> Tensor | None:
        """Undoes llama.cpp's permutation of q and k: in each head, rows 2i and 2i+1 become i and i + D/2."""
        if not self._spec.rope.interleaved or not (".q_proj." in name or ".k_proj." in name):
            return None
        rows = torch.arange(self._tensor(name).shape[0])
        return rows.view(-1, self._spec.head_dim // 2, 2).transpose(1, 2).flatten()


@contextmanager
def _naming(path: Path, name: str) -> Iterator[None]:
    """A quantizer's complaint becomes a `ModelError` that says which tensor it is about."""
    try:
        yield
    except QuantizationError as error:
        raise ModelError(f"{path}: tensor {name} {error}") from None


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is damaged: {error}; download it again") from None
