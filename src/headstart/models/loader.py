"""From files to a decoder that can run: reads weights layer by layer, fuses and prepares them, reports progress.

Owns the order of reading and the checks on values; knows file formats only through `WeightSource`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.hub import ModelError, ModelFiles, Progress
from headstart.layers.decoder_layer import DecoderLayer
from headstart.layers.rotary import RotaryTable
from headstart.models.decoder import Decoder
from headstart.models.sources import WeightSource, open_source
from headstart.ops import HeadShape, Matrix, Ops, PackedMatrix, RMSNorm, make_ops
from headstart.perf.model_spec import ModelSpec
from headstart.perf.tensors import EMBEDDINGS, FINAL_NORM, LM_HEAD, expected_tensors, layer_tensor

_STAGE = "load"


def load_model(
    files: ModelFiles,
    spec: ModelSpec,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Progress | None = None,
    ops: Ops | None = None,
) -> Decoder:
    """Read a model's weights. `ops`: what to compute with; by default the best for the device and dtype.

    Progress counts bytes of the weights on disk, stage "load". Raises `ModelError`, one line naming the tensor, for
    weights that are missing, unexpected, misshapen, of an unsupported type, unreadable or not finite.
    """
    device = torch.device(device)
    weights = _Weights(open_source(files, spec), spec, files, device, dtype, progress)
    return _build(weights, spec, ops or make_ops(device, dtype, threads=torch.get_num_threads()))


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
        tensor = self.source.read(name).to(device=self.device, dtype=self._dtype)
        # One pass and no temporary; a finite sum proves the rest, an infinite one may be overflow: then look closer.
        if not tensor.sum(dtype=torch.float32).isfinite() and not tensor.isfinite().all():
            raise ModelError(f"{self._where}: tensor {name} holds values that are not finite in {self._dtype}")
        self._done += self.source.num_bytes(name)
        self.num_vector_bytes += tensor.nbytes if tensor.dim() == 1 else 0
        if self._progress is not None:
            self._progress(_STAGE, self._done, self._total)
        return tensor

    def matrix(self, name: str) -> Matrix:
        return self.read(name)

    def layer(self, layer: int, name: str) -> Tensor:
        return self.read(layer_tensor(layer, name))

    def bias(self, layer: int, module: str) -> Tensor | None:
        name = layer_tensor(layer, f"{module}.bias")
        return self.read(name) if name in self._names else None


@torch.inference_mode()
def _build(weights: _Weights, spec: ModelSpec, ops: Ops) -> Decoder:
    heads = HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim)
    packer = _Packer(weights, ops)
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
        num_weight_bytes=packer.num_bytes + weights.num_vector_bytes,
    )  # fmt: skip


class _Packer:
    """Matrices from their names to what the operations take, and the bytes they then have."""

    def __init__(self, weights: _Weights, ops: Ops) -> None:
        self.weights = weights
        self.ops = ops
        self.num_bytes = 0

    def pack(self, *names: str) -> PackedMatrix:
        """Several matrices as one, row after row."""
        return self._counted(self.ops.pack(*(self.weights.matrix(name) for name in names)))

    def pack_gated(self, gate: str, up: str) -> PackedMatrix:
        return self._counted(self.ops.pack_gated(self.weights.matrix(gate), self.weights.matrix(up)))

    def _counted(self, matrix: PackedMatrix) -> PackedMatrix:
        self.num_bytes += matrix.num_bytes
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
