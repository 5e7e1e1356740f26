"""Which tensors stand for a matrix in each layout of a quantized checkpoint: names, types, shapes.

Owns names and shapes; reads no tensor. No torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from headstart.hub import ModelError
from headstart.hub.safetensors_header import TensorEntry
from headstart.perf.quantization_spec import QuantizationSpec

Shape = tuple[int, ...]

_FLOATS = ("F32", "F16", "BF16")
_MARKERS = {"awq": "qweight", "gptq": "qweight", "int8-packed": "weight_packed", "int4-packed": "weight_packed"}
_CODE_DTYPES = {"int8": "I8", "fp8": "F8_E4M3"}
# Activations are quantized as they come, if at all: what calibration found out about them is not needed.
_IGNORED = ("input_scale", "output_scale", "activation_scale", "input_zero_point", "output_zero_point", "weight_shape")
_IGNORED_OF_ATTENTION = ("k_scale", "v_scale", "q_scale")  # of a quantized KV cache
_SCALES = ("weight_scale", "weight_scale_inv")  # the second is what fp8 checkpoints call a scale, which it is too


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor as it must be, one of `shapes`."""

    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """What stands for `<module>.weight`, by the names after the module's."""

    module: str
    parts: Mapping[str, Part]
    optional: Mapping[str, Part]  # read if they are there
    ignored: frozenset[str]

    def present(self, found: Collection[str]) -> tuple[str, ...]:
        """The names after the module's of the tensors to read."""
        names = [name for name in self.optional if f"{self.module}.{name}" in found]
        return (*self.parts, *names)


def quantized_matrix(
    spec: QuantizationSpec, name: str, shape: Shape, found: Mapping[str, TensorEntry], where: str
) -> QuantizedMatrix | None:
    """The tensors in place of matrix `name` `[N, K]`, or None if it is there as floats (or not at all).

    Raises `ModelError` for a matrix whose sizes do not go with the groups. That the tensors are there, and right, is
    still to be checked.
    """
    module = name.removesuffix(".weight")
    marker = _MARKERS.get(spec.layout)
    if marker is not None:
        if f"{module}.{marker}" not in found:
            return None
    elif name not in found or found[name].dtype != _CODE_DTYPES[spec.layout]:
        return None
    num_rows, num_columns = shape
    _check_sizes(spec, name, num_rows, num_columns, where)
    scale = next((part for part in _SCALES if f"{module}.{part}" in found), _SCALES[0])
    parts, optional = _parts(spec, num_rows, num_columns, scale)
    return QuantizedMatrix(module, parts, optional, frozenset(f"{module}.{part}" for part in _IGNORED))


def ignored_of_attention(module: str) -> frozenset[str]:
    """Tensors of an attention module that are read by nobody."""
    return frozenset(f"{module}.{name}" for name in _IGNORED_OF_ATTENTION)


def _parts(
    spec: QuantizationSpec, num_rows: int, num_columns: int, scale_name: str
) -> tuple[dict[str, Part], dict[str, Part]]:
    """Needed and optional parts."""
    num_groups = num_columns // spec.group_size if spec.group_size else 1
    if spec.layout in ("awq", "gptq"):
        codes = (num_columns, num_rows // 8) if spec.layout == "awq" else (num_columns // 8, num_rows)
        needed = {
            "qweight": Part(("I32",), (codes,)),
            "qzeros": Part(("I32",), ((num_groups, num_rows // 8),)),
            "scales": Part(_FLOATS, ((num_groups, num_rows),)),
        }
        if spec.layout == "awq":
            return needed, {}
        # Some writers add a bias of zeros to every module, also of models that have none.
        return needed, {"g_idx": Part(("I32",), ((num_columns,),)), "bias": Part(_FLOATS, ((num_rows,),))}
    scale = Part(_FLOATS, _scale_shapes(spec, num_rows, num_groups, num_columns))
    needed = {scale_name: scale}
    optional = {"weight_zero_point": Part(("I8", "I32", *_FLOATS, "F8_E4M3"), scale.shapes)}
    if spec.layout in _CODE_DTYPES:
        needed["weight"] = Part((_CODE_DTYPES[spec.layout],), ((num_rows, num_columns),))
    else:
        per_word = 4 if spec.layout == "int8-packed" else 8
        needed["weight_packed"] = Part(("I32",), ((num_rows, -(-num_columns // per_word)),))
        if not spec.symmetric:
            needed["weight_zero_point"] = Part(("I32",), ((-(-num_rows // per_word), num_groups),))
        optional = {"weight_g_idx": Part(("I32", "I64"), ((num_columns,),))}
    return needed, optional


def _scale_shapes(spec: QuantizationSpec, num_rows: int, num_groups: int, num_columns: int) -> tuple[Shape, ...]:
    if spec.block is not None:
        return ((-(-num_rows // spec.block[0]), -(-num_columns // spec.block[1])),)
    if spec.group_size is not None:
        return ((num_rows, num_groups),)
    return ((num_rows, 1), (num_rows,), (1,), (), (1, 1))


def _check_sizes(spec: QuantizationSpec, name: str, num_rows: int, num_columns: int, where: str) -> None:
    if spec.group_size and num_columns % spec.group_size:
        raise ModelError(
            f"{where}: tensor {name} has {num_columns} columns, no multiple of its groups' {spec.group_size}"
        )
    if spec.layout in ("awq", "gptq") and (num_rows % 8 or num_columns % 8):
        raise ModelError(
            f"{where}: tensor {name} has shape [{num_rows}, {num_columns}], which {spec.method} cannot pack"
        )
