"""The KV tiers of a worker: from the configuration to a connector. Owns what a kept block's content depends on."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from headstart import __version__
from headstart.config import DEFAULT_KV_DISK_SIZE, CacheConfig
from headstart.hub import ModelFiles
from headstart.kv.pool import KVPool
from headstart.kv.tiers import DiskTier, RamTier, TierConnector
from headstart.kv.tiers.connector import Tier
from headstart.quant.cache import cache_key

_CODE_VERSION = 1  # to be raised when the same model's keys and values come out otherwise, to the bit


def make_tiers(
    cache: CacheConfig, files: ModelFiles, pool: KVPool, *, formats: str, operations: str
) -> TierConnector | None:
    """None where no tier is configured. `formats` of weights, activations and the pool; `operations`: which kernels.

    Raises `TierError` for a folder that cannot be used.
    """
    block_bytes = pool.data.shape[0] * pool.layout.block_bytes
    disk: DiskTier | None = None
    if cache.kv_disk is not None:
        disk = DiskTier(
            Path(cache.kv_disk).expanduser(),
            fingerprint=fingerprint(files, pool, formats, operations),
            block_bytes=block_bytes,
            max_bytes=cache.kv_disk_size or DEFAULT_KV_DISK_SIZE,
        )
    tiers: list[Tier] = [] if disk is None else [disk]
    if cache.kv_ram is not None:
        tiers.insert(0, RamTier(cache.kv_ram, None if disk is None else disk.put))
    return TierConnector(pool, tiers) if tiers else None


def fingerprint(files: ModelFiles, pool: KVPool, formats: str, operations: str) -> bytes:
    """32 bytes for all that a block's content depends on beside its prefix: blocks of another one are of no use."""
    layout = pool.layout
    facts = (
        f"{_CODE_VERSION} {__version__} {sys.byteorder} {formats} {operations}",
        f"{pool.data.shape[0]} {layout.num_kv_heads} {layout.head_dim} {layout.block_size} {layout.block_bytes}",
        cache_key(files, "kv", _CODE_VERSION).checkpoint,
    )
    return hashlib.sha256("\n".join(facts).encode()).digest()
