"""How a checkpoint's own quantization is laid out, read from config.json's `quantization_config`.

Owns `QuantizationSpec` and the verdict on what is supported. No torch: both processes read it. What the tensors of each
layout are called and how they are shaped is `quantized_tensors`; what their numbers mean is `headstart.quant`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headstart.hub import ModelError, ModelFiles, read_json
from headstart.perf.fields import Fields

Layout = Literal["int8", "int8-packed", "int4-packed", "fp8", "awq", "gptq"]

GROUP_UNIT = 32  # columns: the group of the formats that matrices are held in; a checkpoint's must be whole ones
_MAX_GROUP = 1 << 20
_MAX_CONFIG_GROUPS = 10_000
SUPPORTED = (
    "compressed-tensors (int8, packed int8 and int4, fp8), fp8, awq (4 bits, version gemm) "
    "and gptq (4 bits, without reordering) are"
)


@dataclass(frozen=True, slots=True)
class QuantizationSpec:
    """The one layout of all quantized matrices of a checkpoint. Others of its matrices may be float."""

    method: str  # quant_method
    layout: Layout
    group_size: int | None = None  # columns that share a scale; None: a whole row, or the whole matrix
    block: tuple[int, int] | None = None  # fp8: rows and columns that share a scale
    symmetric: bool = True  # no zero points, or all in the middle
    zeros_less_one: bool = False  # gptq: zero points are stored minus one


def read_quantization(files: ModelFiles) -> QuantizationSpec | None:
    """None for a checkpoint that is not quantized, and for GGUF, whose tensors say it themselves.

    Raises `ModelError` for a quantization that is damaged or not supported.
    """
    if files.config is None:
        return None
    return quantization_from_config(read_json(files.config), str(files.config))


def quantization_from_config(config: Mapping[str, Any], where: str) -> QuantizationSpec | None:
    """From the content of a config.json; `where` names it in errors. As `read_quantization`."""
    section = config.get("quantization_config") or config.get("compression_config")
    if not section:
        return None
    where = f"{where}: quantization_config"
    if not isinstance(section, Mapping):
        raise ModelError(f"{where} is {type(section).__name__}, expected an object")
    method = section.get("quant_method", "compressed-tensors" if "config_groups" in section else None)
    readers = {"compressed-tensors": _compressed_tensors, "fp8": _fp8, "awq": _awq, "gptq": _gptq}
    if not isinstance(method, str) or method not in readers:
        raise _unsupported(where, f"quant_method {method!r}")
    return readers[method](Fields(section, where))


def _compressed_tensors(fields: Fields) -> QuantizationSpec:
    section, where = fields.values, fields.where
    groups = section.get("config_groups")
    if not isinstance(groups, Mapping) or not 0 < len(groups) <= _MAX_CONFIG_GROUPS:
        raise ModelError(f"{where}: config_groups is no object with at least one group")
    sparsity = section.get("sparsity_config") or {}
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise _unsupported(where, f"sparsity format {sparsity['format']!r}")
    specs = [_config_group(group, section.get("format"), where) for group in groups.values()]
    if any(spec != specs[0] for spec in specs):
        raise _unsupported(where, "a mix of several weight schemes")
    return specs[0]


def _config_group(group: Any, outer_format: Any, where: str) -> QuantizationSpec:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise ModelError(f"{where}: a config group says nothing of its weights")
    fields = Fields(weights, f"{where}: weights")
    bits, kind = fields.count("num_bits", 8, high=64), weights.get("type", "int")
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    form = group.get("format") or outer_format
    layout = _compressed_layout(form, kind, bits)
    if layout is None:
        raise _unsupported(where, f"format {form!r} with {bits}-bit {kind} weights")
    symmetric = fields.flag("symmetric", True)
    if not symmetric and (layout != "int4-packed" or strategy == "tensor"):
        raise _unsupported(where, f"asymmetric {bits}-bit weights with strategy {strategy!r}")
    strategies = {"tensor", "channel", "block"} if layout == "fp8" else {"tensor", "channel", "group"}
    if strategy not in strategies:
        raise _unsupported(where, f"strategy {strategy!r} with {bits}-bit {kind} weights")
    return QuantizationSpec(
        "compressed-tensors",
        layout,
        group_size=_group_size(fields) if strategy == "group" else None,
        block=_block(weights.get("block_structure"), where) if strategy == "block" else None,
        symmetric=symmetric,
    )


def _compressed_layout(form: Any, kind: Any, bits: int) -> Layout | None:
    known: dict[tuple[Any, Any, int], Layout] = {
        ("int-quantized", "int", 8): "int8",
        ("naive-quantized", "int", 8): "int8",
        ("pack-quantized", "int", 8): "int8-packed",
        ("pack-quantized", "int", 4): "int4-packed",
        ("float-quantized", "float", 8): "fp8",
        ("naive-quantized", "float", 8): "fp8",
    }
    return known.get((form, kind, bits)) if isinstance(form, str) and isinstance(kind, str) else None


def _fp8(fields: Fields) -> QuantizationSpec:
    form = fields.values.get("fmt") or "e4m3"
    if form not in ("e4m3", "float8_e4m3fn"):
        raise _unsupported(fields.where, f"fp8 format {form!r}")
    block = fields.values.get("weight_block_size")
    return QuantizationSpec("fp8", "fp8", block=None if block is None else _block(block, fields.where))


def _awq(fields: Fields) -> QuantizationSpec:
    _require_bits(fields, "awq")
    version = fields.values.get("version") or "gemm"
    if not isinstance(version, str) or version.lower() != "gemm":
        raise _unsupported(fields.where, f"awq version {version!r}")
    if not fields.flag("zero_point", True):
        raise _unsupported(fields.where, "awq without zero points")
    return QuantizationSpec("awq", "awq", group_size=_group_size(fields), symmetric=False)


def _gptq(fields: Fields) -> QuantizationSpec:
    _require_bits(fields, "gptq")
    form = fields.values.get("checkpoint_format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise _unsupported(fields.where, f"gptq checkpoint_format {form!r}")
    return QuantizationSpec(
        "gptq",
        "gptq",
        group_size=_group_size(fields),
        symmetric=fields.flag("sym", False),
        zeros_less_one=form == "gptq",
    )


def _require_bits(fields: Fields, method: str) -> None:
    bits = fields.count("bits", high=64)
    if bits != 4:
        raise _unsupported(fields.where, f"{method} with {bits} bits")


def _group_size(fields: Fields) -> int | None:
    """-1, and nothing, stand for a whole row."""
    if fields.values.get("group_size") in (None, -1):
        return None
    size = fields.count("group_size", high=_MAX_GROUP)
    if size % GROUP_UNIT:
        raise ModelError(f"{fields.where}: group_size {size} is not supported (multiples of {GROUP_UNIT} are)")
    return size


def _block(value: Any, where: str) -> tuple[int, int]:
    sizes = value if isinstance(value, list) else []
    if len(sizes) != 2 or not all(type(size) is int and 1 <= size <= _MAX_GROUP for size in sizes):
        raise ModelError(f"{where}: the block of the weights is {value!r}, expected two sizes such as [128, 128]")
    return sizes[0], sizes[1]


def _unsupported(where: str, what: str) -> ModelError:
    return ModelError(f"{where}: {what} is not supported ({SUPPORTED}): use another checkpoint or a GGUF file")
