"""The memory of keys and values. Must not know requests or schedulers."""

from headstart.kv.pool import KVPool

__all__ = ["KVPool"]
