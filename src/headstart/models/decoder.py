"""The decoder: embeddings, layers, final norm, LM head. Driven by a layout; must not know files, requests, schedulers.

Letters: T rows of the step, C hidden size, V vocabulary, R rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headstart.kv.pool import KVPool
from headstart.layers.decoder_layer import DecoderLayer
from headstart.layers.rotary import RotaryTable
from headstart.ops import AttentionStep, BatchLayout, Embeddings, HeadShape, KVFormat, KVLayout, NormLinear, Ops
from headstart.perf.model_spec import ModelSpec


class Decoder:
    """A decoder-only transformer over paged keys and values. Made by `models.load_model`."""

    def __init__(
        self,
        spec: ModelSpec,
        ops: Ops,
        heads: HeadShape,
        embeddings: Embeddings,
        layers: tuple[DecoderLayer, ...],
        lm_head: NormLinear,  # behind the final norm
        rotary: RotaryTable,
        *,
        device: torch.device,
        num_weight_bytes: int,
        quantized: bool,
    ) -> None:
        self.spec = spec
        self.ops = ops
        self.device = device
        self.num_weight_bytes = num_weight_bytes  # as they are held here
        self.quantized = quantized  # some of the matrices
        self._heads = heads
        self._embeddings = embeddings
        self._layers = layers
        self._lm_head = lm_head
        self._rotary = rotary

    def kv_layout(self, block_size: int, kv_format: KVFormat) -> KVLayout:
        """How a layer's keys and values are to be held for this decoder."""
        return self.ops.kv_layout(self._heads, block_size, kv_format)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        layout: BatchLayout,
        pool: KVPool,
        before_layer: Callable[[int], None] = lambda layer: None,
    ) -> Tensor:
        """Hidden states before the final norm, `[T, C]`, of token ids `[T]`. Writes keys and values to the pool.

        `before_layer` returns when what the pool is to hold of that layer beforehand is there.
        """
        step = self.attention_step(layout, pool)
        x = self._embeddings(token_ids)
        for index, (layer, kv) in enumerate(zip(self._layers, pool.layers, strict=True)):
            before_layer(index)
            x = layer(x, step, kv)
        return x

    @torch.inference_mode()
    def attention_step(self, layout: BatchLayout, pool: KVPool) -> AttentionStep:
        """What every layer of one step shares: positions, places, masks."""
        cos, sin = self._rotary.rows(layout.positions)
        return self.ops.attention_step(layout, self._heads, pool.layout, cos, sin)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[R, V]` float32 of hidden states `[R, C]`."""
        return self._lm_head(hidden).float()
