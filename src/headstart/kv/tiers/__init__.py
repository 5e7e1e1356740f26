"""KV tiers: what left the pool is kept in RAM (for accelerators) and on disk, and comes back without being recomputed.

Owns the worker's half of KV that comes from a tier: copies of evicted blocks, files, loads. Knows neither requests nor
the scheduler: blocks have names (`headstart.core.chain`), loads have numbers.
"""

from headstart.kv.tiers.connector import TierConnector
from headstart.kv.tiers.disk import DiskTier, TierError
from headstart.kv.tiers.ram import RamTier

__all__ = ["DiskTier", "RamTier", "TierConnector", "TierError"]
