"""Does a checkpoint fit its specification? Names, shapes and types of its tensors, from the files' headers alone.

Owns that verdict, which the API process gives before it listens and the engine repeats on what it then reads. No torch,
and no tensor is read: what only values can tell (numbers that are not finite) is the loader's to find.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from headstart.hub import ModelError, ModelFiles
from headstart.hub.gguf_reader import GGUFFile, GGUFTensor, gguf_reader
from headstart.hub.safetensors_header import TensorEntry, safetensors_header
from headstart.perf.model_spec import ModelSpec, read_model_spec, spec_from_gguf
from headstart.perf.quantization_spec import QuantizationSpec, read_quantization
from headstart.perf.quantized_tensors import Part, QuantizedMatrix, ignored_of_attention, quantized_matrix
from headstart.perf.tensors import GGUF_ROPE_FACTORS, LM_HEAD, expected_tensors, gguf_name, layer_tensor

_SAFETENSORS_DTYPES = ("F32", "F16", "BF16")
_GGUF_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


def read_checked_spec(files: ModelFiles) -> ModelSpec:
    """`read_model_spec`, and the weights' headers agree with it. A GGUF file's is parsed once: that takes a while.

    Raises `ModelError`, one line naming the tensor, also for what is missing, unexpected, misshapen or unsupported.
    """
    if files.format == "gguf":
        file = gguf_reader(files.weights[0])
        spec = spec_from_gguf(file)
        check_gguf(file, spec)
    else:
        spec = read_model_spec(files)
        check_safetensors(files.weights, spec, read_quantization(files))
    return spec


def check_vocabulary(num_tokens: int, spec: ModelSpec, where: str) -> None:
    """Every token of a tokenizer needs a row of the model (which may have more). Raises `ModelError`."""
    if num_tokens > spec.vocab_size:
        raise ModelError(
            f"{where}: the tokenizer has {num_tokens} tokens, but the model only {spec.vocab_size}: the two do not "
            "belong together"
        )


def check_safetensors(
    paths: tuple[Path, ...], spec: ModelSpec, quantization: QuantizationSpec | None = None
) -> dict[str, TensorEntry]:
    """All tensors of the files by name. `quantization`: the checkpoint's own. Raises as `read_checked_spec`."""
    found: dict[str, TensorEntry] = {}
    files: dict[str, Path] = {}
    for path in paths:
        for name, entry in safetensors_header(path).items():
            if name in found:
                raise ModelError(f"{path}: tensor {name} is in {files[name].name} too")
            found[name], files[name] = entry, path
    where = str(paths[0] if len(paths) == 1 else paths[0].parent)
    _check_layers(spec, len(found), where)
    matrices = quantized_matrices(found, spec, quantization, where)
    expected, unused = _parts(spec, matrices, found)
    unused |= {name for name in found if name.endswith(".rotary_emb.inv_freq")}
    if spec.tie_word_embeddings:  # some checkpoints hold the tied matrix twice
        copies = LM_HEAD.removesuffix("weight") if quantization else LM_HEAD
        unused |= {name for name in found if name.startswith(copies)}
    shapes = {name: entry.shape for name, entry in found.items()}
    _check_shapes(
        shapes, {name: _wanted_shape(part, found.get(name)) for name, part in expected.items()}, unused, where
    )
    for name, part in expected.items():
        if found[name].dtype not in part.dtypes:
            verb = "are" if len(part.dtypes) > 1 else "is"
            raise ModelError(
                f"{files[name]}: tensor {name} has the unsupported dtype {found[name].dtype} "
                f"({', '.join(part.dtypes)} {verb})"
            )
    return found


def quantized_matrices(
    found: Mapping[str, TensorEntry], spec: ModelSpec, quantization: QuantizationSpec | None, where: str
) -> dict[str, QuantizedMatrix]:
    """The matrices that are there in codes, by their names as floats. Raises as `read_checked_spec`."""
    matrices: dict[str, QuantizedMatrix] = {}
    if quantization is None:
        return matrices
    for name, shape in expected_tensors(spec).items():
        if len(shape) == 2 and (matrix := quantized_matrix(quantization, name, shape, found, where)) is not None:
            matrices[name] = matrix
    return matrices


def _parts(
    spec: ModelSpec, matrices: Mapping[str, QuantizedMatrix], found: Mapping[str, TensorEntry]
) -> tuple[dict[str, Part], set[str]]:
    """What must be there, and what may."""
    expected: dict[str, Part] = {}
    unused: set[str] = set()
    plain = expected_tensors(spec)
    for name, shape in plain.items():
        matrix = matrices.get(name)
        if matrix is None:
            expected[name] = Part(_SAFETENSORS_DTYPES, (shape,))
            continue
        parts = {**matrix.parts, **matrix.optional}
        full = {f"{matrix.module}.{part}": parts[part] for part in matrix.present(found)}
        expected |= {part: kind for part, kind in full.items() if part == name or part not in plain}
        unused |= matrix.ignored
    if matrices:
        for layer in range(spec.num_layers):
            unused |= ignored_of_attention(layer_tensor(layer, "self_attn"))
    return expected, unused


def _wanted_shape(part: Part, found: TensorEntry | None) -> tuple[int, ...]:
    return found.shape if found is not None and found.shape in part.shapes else part.shapes[0]


def check_gguf(file: GGUFFile, spec: ModelSpec) -> None:
    """Raises as `read_checked_spec`."""
    _check_layers(spec, len(file.tensors), str(file.path))
    expected = {gguf_name(name): shape for name, shape in expected_tensors(spec).items()}
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    _check_shapes(shapes, expected, {GGUF_ROPE_FACTORS}, str(file.path))
    for name in expected:
        _check_gguf_type(file, file.tensors[name])
    factors = file.tensors.get(GGUF_ROPE_FACTORS)
    if factors is not None:
        _check_gguf_type(file, factors)
        _check_shapes({factors.name: factors.shape}, {factors.name: (spec.head_dim // 2,)}, (), str(file.path))


def _check_layers(spec: ModelSpec, num_tensors: int, where: str) -> None:
    """First: the names of a damaged number of layers would fill the memory."""
    if spec.num_layers > num_tensors:
        raise ModelError(f"{where}: {spec.num_layers} layers are announced, but there are only {num_tensors} tensors")


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
