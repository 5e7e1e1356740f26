"""From files to a decoder that can run: reads weights layer by layer, fuses and prepares them, reports progress.

Owns the order of reading and the checks on values; knows file formats only through `WeightSource`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.config import Quantization
from headstart.hub import ModelError, ModelFiles, Progress
from headstart.layers.decoder_layer import DecoderLayer
from headstart.layers.rotary import RotaryTable
from headstart.models.decoder import Decoder
from headstart.models.matrices import MatrixReader
from headstart.models.sources import WeightSource, open_source
from headstart.ops import HeadShape, Matrix, Ops, PackedMatrix, QuantizedWeight, RMSNorm, make_ops
from headstart.perf.model_spec import ModelSpec
from headstart.perf.tensors import EMBEDDINGS, FINAL_NORM, LM_HEAD, expected_tensors, layer_tensor
from headstart.quant.requantize import in_one_format
from headstart.quant.settle import settle_quantization

_STAGE = "load"


def load_model(
    files: ModelFiles,
    spec: ModelSpec,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Progress | None = None,
    ops: Ops | None = None,
    quantization: Quantization = "none",
) -> Decoder:
    """Read a model's weights. `ops`: what to compute with; by default the best for the device and dtype.
    `quantization`: what becomes of the matrices; by default floats of `dtype`.

    Progress counts bytes of the weights on disk, stage "load". Raises `ModelError`, one line naming the tensor, for
    weights that are missing, unexpected, misshapen, of an unsupported type, unreadable or not finite, and `ConfigError`
    for a quantization that cannot be had here.
    """
    device = torch.device(device)
    weights = _Weights(open_source(files, spec), spec, files, device, dtype, progress)
    ops = ops or make_ops(device, dtype, threads=torch.get_num_threads())
    names = [name for name, shape in expected_tensors(spec).items() if len(shape) == 2]
    own = set(weights.source.formats.values())
    settled = settle_quantization(quantization, own, "cuda" if device.type == "cuda" else "cpu", ops.weight_formats)
    with MatrixReader(weights.source, files, names, settled, weights.floats) as matrices:
        return _build(weights, matrices, spec, ops)


class _Weights:
    """Reads named weights to where they are used and counts the bytes."""

    def __init__(
        self,
        source: WeightSource,
        spec: ModelSpec,
        files: ModelFiles,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress | None,
    ) -> None:
        self.source = source
        self.device = device
        self._dtype = dtype
        self._where = files.name
        self._progress = progress
        self._done = 0
        self.num_vector_bytes = 0  # norms and biases
        self._names = expected_tensors(spec)
        self._total = sum(source.num_bytes(name) for name in self._names)

    def read(self, name: str) -> Tensor:
        """A vector, or whatever else is no matrix of a linear layer."""
        tensor = self.floats(name)
        self.num_vector_bytes += tensor.nbytes
        self.count(name)
        return tensor

    def floats(self, name: str) -> Tensor:
        tensor = self.source.read(name).to(device=self.device, dtype=self._dtype)
        # One pass and no temporary; a finite sum proves the rest, an infinite one may be overflow: then look closer.
        if not tensor.sum(dtype=torch.float32).isfinite() and not tensor.isfinite().all():
            raise ModelError(f"{self._where}: tensor {name} holds values that are not finite in {self._dtype}")
        return tensor

    def count(self, name: str) -> None:
        """This tensor is done."""
        self._done += self.source.num_bytes(name)
        if self._progress is not None:
            self._progress(_STAGE, self._done, self._total)

    def layer(self, layer: int, name: str) -> Tensor:
        return self.read(layer_tensor(layer, name))

    def bias(self, layer: int, module: str) -> Tensor | None:
        name = layer_tensor(layer, f"{module}.bias")
        return self.read(name) if name in self._names else None


@torch.inference_mode()
def _build(weights: _Weights, matrices: MatrixReader, spec: ModelSpec, ops: Ops) -> Decoder:
    heads = HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim)
    packer = _Packer(weights, matrices, ops)
    table = packer.pack(EMBEDDINGS)
    layers = tuple(_layer(packer, spec, index) for index in range(spec.num_layers))
    final_norm = RMSNorm(weights.read(FINAL_NORM), spec.rms_norm_eps)
    lm_head = ops.lm_head(final_norm, table if spec.tie_word_embeddings else packer.pack(LM_HEAD))
    rotary = RotaryTable(
        spec.rope, spec.head_dim, spec.max_position_embeddings, weights.device, weights.source.rope_factors()
    )
    embeddings = ops.embeddings(table)
    return Decoder(
        spec, ops, heads, embeddings, layers, lm_head, rotary, device=weights.device,
        num_weight_bytes=packer.num_bytes + weights.num_vector_bytes, quantized=packer.quantized,
    )  # fmt: skip


class _Packer:
    """Matrices from their names to what the operations take, and the bytes they then have."""

    def __init__(self, weights: _Weights, matrices: MatrixReader, ops: Ops) -> None:
        self.weights = weights
        self.ops = ops
        self.num_bytes = 0
        self.quantized = False  # any matrix so far
        self._matrices = matrices

    def pack(self, *names: str) -> PackedMatrix:
        """Several matrices as one, row after row."""
        return self._counted(self.ops.pack(*self._read(names)), names)

    def pack_gated(self, gate: str, up: str) -> PackedMatrix:
        return self._counted(self.ops.pack_gated(*self._read((gate, up))), (gate, up))

    def _read(self, names: tuple[str, ...]) -> list[Matrix]:
        parts = in_one_format([self._matrices.read(name) for name in names])
        self.quantized = self.quantized or isinstance(parts[0], QuantizedWeight)
        return parts

    def _counted(self, matrix: PackedMatrix, names: tuple[str, ...]) -> PackedMatrix:
        self.num_bytes += matrix.num_bytes
        for name in names:
            self.weights.count(name)
        return matrix


def _layer(packer: _Packer, spec: ModelSpec, index: int) -> DecoderLayer:
    weights, ops, eps = packer.weights, packer.ops, spec.rms_norm_eps

    def names(*modules: str) -> list[str]:
        return [layer_tensor(index, f"{module}.weight") for module in modules]

    def bias(*modules: str) -> Tensor | None:
        biases = [found for module in modules if (found := weights.bias(index, module)) is not None]
        return torch.cat(biases) if biases else None

    def norm(module: str) -> RMSNorm:
        return RMSNorm(weights.layer(index, f"{module}.weight"), eps)

    projections = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qk_norm = None
    if spec.qk_norm:
        query = weights.layer(index, "self_attn.q_norm.weight")
        qk_norm = ops.qk_norm(query, weights.layer(index, "self_attn.k_norm.weight"), eps)
    return DecoderLayer(
        qkv=ops.norm_linear(norm("input_layernorm"), packer.pack(*names(*projections)), bias(*projections)),
        qk_norm=qk_norm,
        rotate=index not in spec.no_rope_layers,
        output=ops.add_linear(packer.pack(*names("self_attn.o_proj")), bias("self_attn.o_proj")),
        mlp=ops.gated_mlp(
            norm("post_attention_layernorm"),
            packer.pack_gated(*names("mlp.gate_proj", "mlp.up_proj")),
            packer.pack(*names("mlp.down_proj")),
            gate_bias=bias("mlp.gate_proj"),
            up_bias=bias("mlp.up_proj"),
            down_bias=bias("mlp.down_proj"),
        ),
    )
