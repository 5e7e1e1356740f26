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
from headstart.ops import HeadShape, Ops, make_ops
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
    return _build(weights, spec, ops or make_ops(device, dtype, spec.head_dim))


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
        self._names = expected_tensors(spec)
        self._total = sum(source.num_bytes(name) for name in self._names)

    def read(self, name: str) -> Tensor:
        tensor = self.source.read(name).to(device=self.device, dtype=self._dtype)
        # One pass and no temporary; a finite sum proves the rest, an infinite one may be overflow: then look closer.
        if not tensor.sum(dtype=torch.float32).isfinite() and not tensor.isfinite().all():
            raise ModelError(f"{self._where}: tensor {name} holds values that are not finite in {self._dtype}")
        self._done += self.source.num_bytes(name)
        if self._progress is not None:
            self._progress(_STAGE, self._done, self._total)
        return tensor

    def layer(self, layer: int, name: str) -> Tensor:
        return self.read(layer_tensor(layer, name))

    def bias(self, layer: int, module: str) -> Tensor | None:
        name = layer_tensor(layer, f"{module}.bias")
        return self.read(name) if name in self._names else None


@torch.inference_mode()
def _build(weights: _Weights, spec: ModelSpec, ops: Ops) -> Decoder:
    heads = HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim)
    embeddings = weights.read(EMBEDDINGS)
    layers = tuple(_layer(weights, spec, ops, heads, index) for index in range(spec.num_layers))
    final_norm = ops.rms_norm(weights.read(FINAL_NORM), spec.rms_norm_eps)
    lm_head = ops.linear(embeddings if spec.tie_word_embeddings else weights.read(LM_HEAD), None)
    rotary = RotaryTable(
        spec.rope, spec.head_dim, spec.max_position_embeddings, weights.device, weights.source.rope_factors()
    )
    return Decoder(spec, ops, heads, embeddings, layers, final_norm, lm_head, rotary)


def _layer(weights: _Weights, spec: ModelSpec, ops: Ops, heads: HeadShape, index: int) -> DecoderLayer:
    def linear(*modules: str) -> tuple[Tensor, Tensor | None]:
        """Several matrices as one, row after row."""
        matrix = torch.cat([weights.layer(index, f"{module}.weight") for module in modules])
        biases = [bias for module in modules if (bias := weights.bias(index, module)) is not None]
        return matrix, torch.cat(biases) if biases else None

    qkv = ops.linear(*linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
    qk_norm = None
    if spec.qk_norm:
        query = weights.layer(index, "self_attn.q_norm.weight").expand(heads.num_heads, -1)
        key = weights.layer(index, "self_attn.k_norm.weight").expand(heads.num_kv_heads, -1)
        qk_norm = ops.rms_norm(torch.cat((query, key)), spec.rms_norm_eps)
    gate, gate_bias = linear("mlp.gate_proj")
    up, up_bias = linear("mlp.up_proj")
    return DecoderLayer(
        heads=heads,
        attention_norm=ops.rms_norm(weights.layer(index, "input_layernorm.weight"), spec.rms_norm_eps),
        qkv=qkv,
        qk_norm=qk_norm,
        rotate=index not in spec.no_rope_layers,
        output=ops.linear(*linear("self_attn.o_proj")),
        mlp_norm=ops.rms_norm(weights.layer(index, "post_attention_layernorm.weight"), spec.rms_norm_eps),
        gate_up=ops.gated_linear(gate, up, gate_bias, up_bias),
        down=ops.linear(*linear("mlp.down_proj")),
    )
