"""The connector: blocks out of a pool and back into other places of it, through its threads."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from headstart.core.connector import KVArrival, TierState
from headstart.core.step import BlockFill, BlockSave
from headstart.kv import KVPool
from headstart.kv.tiers import RamTier, TierConnector
from headstart.ops import HeadShape, KVFormat, TorchOps

NAMES = [bytes([number]) * 16 for number in range(8)]


def make_pool() -> KVPool:
    pool = KVPool(TorchOps().kv_layout(HeadShape(4, 2, 8), 4, KVFormat.FLOAT32), 3, 16, "cpu")
    pool.data.copy_(torch.randint(0, 256, pool.data.shape, dtype=torch.uint8))
    return pool


class WatchedTier(RamTier):
    """Says when it has been given so many blocks."""

    def __init__(self) -> None:
        super().__init__(1 << 30)
        self._changed = threading.Condition()

    def put(self, name: bytes, content: memoryview) -> None:
        with self._changed:
            super().put(name, content)
            self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self) == count, timeout=20)


def arrivals_of(connector: TierConnector) -> list[KVArrival]:
    found: list[KVArrival] = []
    while not found or not found[-1].ended:
        connector.wait(20)
        found += connector.take_arrivals()
    return found


@pytest.fixture
def pool() -> KVPool:
    return make_pool()


def test_saved_blocks_come_back_layer_by_layer(pool: KVPool) -> None:
    tier = WatchedTier()
    connector = TierConnector(pool, [tier])
    before = pool.data.clone()
    connector.save([BlockSave(block_id, NAMES[block_id]) for block_id in range(5)])
    assert connector.stores(NAMES[4])
    tier.wait_for(5)
    assert connector.match(NAMES) == 5
    assert connector.tier_states() == (TierState("ram", True, 5, 5 * pool.data[:, 0].nbytes),)
    pool.data.zero_()
    connector.load(7, NAMES[:5])
    assert arrivals_of(connector)[-1] == KVArrival(7, 5, True)
    connector.settle(7, 4)
    wait = connector.fill([BlockFill(7, (9, -1, 11, 12))])
    for layer in range(3):
        wait(layer)
        for block_id, source in ((9, 0), (11, 2), (12, 3)):
            assert torch.equal(pool.layers[layer][block_id], before[layer, source])
    assert not pool.data[:, 10].any()
    connector.close()  # joins the threads
    assert connector._staged_bytes == 0


def test_a_block_that_is_gone_ends_the_load_there(pool: KVPool) -> None:
    tier = WatchedTier()
    connector = TierConnector(pool, [tier])
    connector.save([BlockSave(block_id, NAMES[block_id]) for block_id in (0, 1, 3)])
    tier.wait_for(3)
    connector.load(1, NAMES[:4])
    assert arrivals_of(connector)[-1] == KVArrival(1, 2, True)
    connector.settle(1, 0)
    assert connector._staged_bytes == 0
    connector.close()


class BlockedTier(WatchedTier):
    """Neither reads nor writes until it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def put(self, name: bytes, content: memoryview) -> None:
        self.gate.wait(20)
        super().put(name, content)

    def read(self, name: bytes, into: memoryview) -> bool:
        self.gate.wait(20)
        return super().read(name, into)


def test_a_tier_that_cannot_follow_loses_blocks_and_blocks_nobody(
    pool: KVPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstart.kv.tiers.connector._MAX_BACKLOG_BYTES", 3 * pool.data[:, 0].nbytes)
    tier = BlockedTier()
    connector = TierConnector(pool, [tier])
    connector.save([BlockSave(block_id, NAMES[block_id]) for block_id in range(2)])
    connector.save([BlockSave(block_id, NAMES[block_id]) for block_id in range(2, 5)])
    assert connector.num_dropped_blocks == 2
    tier.gate.set()
    tier.wait_for(3)
    connector.close()


def test_a_load_that_nobody_wants_any_more_frees_its_place(pool: KVPool) -> None:
    tier = BlockedTier()
    connector = TierConnector(pool, [tier])
    connector.load(1, NAMES[:2])
    connector.load(2, NAMES[:2])
    waited = connector.load_seconds(1)
    connector.settle(1, 0)
    connector.settle(2, 0)
    connector.load(3, NAMES[:1])
    tier.gate.set()
    assert arrivals_of(connector)[-1] == KVArrival(3, 0, True)  # its turn came: the reader is through with the others
    connector.settle(3, 0)
    assert connector._staged_bytes == 0
    assert connector.load_seconds(1) < waited
    connector.close()


def test_what_is_cached_at_the_end_is_kept(pool: KVPool, tmp_path: Path) -> None:
    tier = WatchedTier()
    connector = TierConnector(pool, [tier])
    blocks = [BlockSave(block_id, NAMES[block_id]) for block_id in range(6)]
    assert connector.keep(blocks, 20.0) == 6
    tier.wait_for(6)
    assert connector.keep(blocks, 20.0) == 0, "they are kept already"
    connector.close()


def test_slow_reads_are_learned_and_forgotten(pool: KVPool) -> None:
    now = [0.0]
    connector = TierConnector(pool, [RamTier(1 << 20)], clock=lambda: now[0])
    before = connector.load_seconds(10)
    connector._learn(0.0, 1.0, last=True)
    slow = connector.load_seconds(10)
    assert slow > 100 * before
    now[0] = 120.0
    assert connector.load_seconds(10) == pytest.approx(slow / 4, rel=0.01)
    connector.close()
