"""The decoder: embeddings, layers, final norm, LM head. Driven by a layout; must not know files, requests, schedulers.

Letters: T rows of the step, C hidden size, V vocabulary, R rows whose logits are wanted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.kv.pool import KVPool
from headstart.layers.decoder_layer import DecoderLayer
from headstart.layers.rotary import RotaryTable
from headstart.models.footprint import held_bytes
from headstart.ops import AttentionStep, BatchLayout, HeadShape, Linear, Norm, Ops, PoolShape
from headstart.perf.model_spec import ModelSpec


class Decoder:
    """A decoder-only transformer over paged keys and values. Made by `models.load_model`."""

    def __init__(
        self,
        spec: ModelSpec,
        ops: Ops,
        heads: HeadShape,
        embeddings: Tensor,  # [V, C]
        layers: tuple[DecoderLayer, ...],
        final_norm: Norm,
        lm_head: Linear,
        rotary: RotaryTable,
    ) -> None:
        self.spec = spec
        self.ops = ops
        self._heads = heads
        self._embeddings = embeddings
        self._layers = layers
        self._final_norm = final_norm
        self._lm_head = lm_head
        self._rotary = rotary

    @property
    def device(self) -> torch.device:
        return self._embeddings.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embeddings.dtype

    @property
    def num_weight_bytes(self) -> int:
        """Bytes that the weights take in memory as they are held here."""
        return held_bytes(self._embeddings, self._layers, self._final_norm, self._lm_head)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, layout: BatchLayout, pool: KVPool) -> Tensor:
        """Hidden states after the final norm, `[T, C]`, of token ids `[T]`. Writes keys and values to the pool."""
        step = self.attention_step(layout, pool)
        x = self._embeddings[token_ids]
        for index, layer in enumerate(self._layers):
            x = layer(x, step, pool.keys(index), pool.values(index))
        return self._final_norm(x)

    @torch.inference_mode()
    def attention_step(self, layout: BatchLayout, pool: KVPool) -> AttentionStep:
        """What every layer of one step shares: positions, places, masks."""
        shape = PoolShape(pool.num_blocks, pool.block_size, pool.dtype)
        cos, sin = self._rotary.rows(layout.positions)
        return self.ops.attention_step(layout, self._heads, shape, cos, sin)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[R, V]` float32 of hidden states `[R, C]`."""
        return self._lm_head(hidden).float()
