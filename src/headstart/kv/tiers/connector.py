"""TierConnector: the one object between scheduler, worker and tiers. Owns its two threads and what is staged.

Three callers. The scheduler's thread asks and starts loads (`KVConnector`); the executor's thread copies evicted blocks
out of the pool (`save`) and staged ones into it (`fill`), layer by layer ahead of the layers that compute; the engine
loop is woken when a load came further (`take_arrivals`). A writer and a reader thread do what may be slow.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from headstart.core.connector import KVArrival, TierState
from headstart.core.step import BlockFill, BlockSave
from headstart.kv.pool import KVPool

_MAX_BACKLOG_BYTES = 256 << 20  # of blocks that wait to be written; beyond it evicted ones are dropped
_MAX_STAGED_BYTES = 512 << 20  # of loads that no step has taken yet; further ones wait
_FIRST_SECONDS_PER_BYTE = 1 / 500e6  # before any load has shown it
_FIRST_NEWS_SECONDS = 0.002  # two threads are woken, and a block read
_RATE = 0.3  # weight of the newest load
_FORGET_SECONDS = 60.0  # a rate is thought half as bad after so long without a load: a disk may have recovered
_NOTICE_SECONDS = 0.001  # at most so often is the engine told of a load that goes on


class Tier(Protocol):
    """A place for blocks. `put` is called by the writer's thread only, `read` by the reader's; the rest by any."""

    kind: str

    @property
    def is_off(self) -> bool: ...

    def __contains__(self, name: bytes) -> bool: ...

    def __len__(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    def put(self, name: bytes, content: memoryview) -> None: ...

    def read(self, name: bytes, into: memoryview) -> bool: ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Load:
    load_id: int
    names: tuple[bytes, ...]
    staged: Tensor | None = None  # [N, L, block bytes]
    num_settled: int | None = None  # the scheduler is through with it; so many blocks will be filled in
    lock: threading.Lock = field(default_factory=threading.Lock)


class TierConnector:
    """Implements `core.connector.KVConnector`. `tiers`: the fastest first; new blocks go to the first."""

    def __init__(self, pool: KVPool, tiers: Sequence[Tier], clock: Callable[[], float] = time.monotonic) -> None:
        assert tiers
        self._pool = pool
        self._tiers = tuple(tiers)
        self._clock = clock
        self._block_bytes = pool.data.shape[0] * pool.layout.block_bytes
        self._loads: dict[int, _Load] = {}
        self._to_read: queue.SimpleQueue[_Load | None] = queue.SimpleQueue()
        self._to_write: queue.SimpleQueue[tuple[tuple[bytes, ...], Tensor] | None] = queue.SimpleQueue()
        self._being_written: set[bytes] = set()
        self._arrivals: queue.SimpleQueue[KVArrival] = queue.SimpleQueue()
        self._on_arrival: Callable[[], None] = lambda: None
        self._arrived = threading.Event()
        self._staged_bytes = 0
        self._staged_changed = threading.Condition()
        self._queued_blocks = 0  # of loads that are not staged yet
        self._queued_lock = threading.Lock()
        self._seconds_per_byte, self._measured_at = _FIRST_SECONDS_PER_BYTE, clock()
        self._closing = False
        self.num_dropped_blocks = 0  # evicted too fast to be written
        self._filler = ThreadPoolExecutor(1, thread_name_prefix="headstart-kv-fill")
        self._threads = (
            threading.Thread(target=self._read_loads, name="headstart-kv-read", daemon=True),
            threading.Thread(target=self._write_blocks, name="headstart-kv-write", daemon=True),
        )
        for thread in self._threads:
            thread.start()

    # -- the scheduler's thread ----------------------------------------------------------------------------------

    def match(self, names: Sequence[bytes]) -> int:
        return next((index for index, name in enumerate(names) if not self._is_kept(name)), len(names))

    def stores(self, name: bytes) -> bool:
        return name in self._being_written or self._is_kept(name)

    def load_seconds(self, num_blocks: int) -> float:
        halvings = (self._clock() - self._measured_at) / _FORGET_SECONDS
        rate = self._seconds_per_byte * 0.5 ** min(halvings, 60.0)
        return _FIRST_NEWS_SECONDS + max(rate, 1e-12) * (num_blocks + self._queued_blocks) * self._block_bytes

    def load(self, load_id: int, names: Sequence[bytes]) -> None:
        load = self._loads[load_id] = _Load(load_id, tuple(names))
        with self._queued_lock:
            self._queued_blocks += len(names)
        self._to_read.put(load)

    def settle(self, load_id: int, num_blocks: int) -> None:
        load = self._loads[load_id]
        with load.lock:
            load.num_settled = num_blocks
            if num_blocks == 0:
                self._drop(load)

    # -- the engine loop -----------------------------------------------------------------------------------------

    def on_arrival(self, call: Callable[[], None]) -> None:
        """`call` is called, in a thread of the connector's, when there is something to take."""
        self._on_arrival = call

    def take_arrivals(self) -> list[KVArrival]:
        self._arrived.clear()
        found = []
        while not self._arrivals.empty():
            found.append(self._arrivals.get())
        return found

    def wait(self, seconds: float) -> None:
        """Until something arrived, or so long."""
        self._arrived.wait(max(0.0, seconds))

    def tier_states(self) -> tuple[TierState, ...]:
        return tuple(TierState(tier.kind, not tier.is_off, len(tier), tier.num_bytes) for tier in self._tiers)

    # -- the executor's thread -----------------------------------------------------------------------------------

    def save(self, saves: Sequence[BlockSave]) -> None:
        """Copy blocks out of the pool, to be written behind. Where writing cannot follow they are dropped."""
        room = _MAX_BACKLOG_BYTES // self._block_bytes - len(self._being_written)
        self.num_dropped_blocks += max(0, len(saves) - max(0, room))
        self._hand_over(saves[: max(0, room)])

    def fill(self, fills: Sequence[BlockFill]) -> Callable[[int], None]:
        """Start to copy staged blocks into the pool, layer by layer. Returns what waits for a layer to be there."""
        parts: list[tuple[Tensor, Tensor]] = []
        for load_id, block_ids in fills:
            load = self._loads[load_id]
            assert load.staged is not None
            wanted = [index for index, block_id in enumerate(block_ids) if block_id >= 0]
            ids = torch.tensor([block_ids[index] for index in wanted], dtype=torch.long, device=self._pool.device)
            is_prefix = wanted == list(range(len(wanted)))
            parts.append((load.staged if is_prefix else load.staged[torch.tensor(wanted, dtype=torch.long)], ids))
        layers: list[Future[None]] = [
            self._filler.submit(self._fill_layer, layer, parts) for layer in range(len(self._pool.layers))
        ]
        layers[-1].add_done_callback(lambda _: self._filled(fills))
        return lambda layer: layers[layer].result()

    @torch.inference_mode()  # as the pool's views were made
    def _fill_layer(self, layer: int, parts: list[tuple[Tensor, Tensor]]) -> None:
        for staged, ids in parts:
            self._pool.layers[layer][ids] = staged[: len(ids), layer].to(self._pool.device)

    def _filled(self, fills: Sequence[BlockFill]) -> None:
        for load_id, _ in fills:
            self._drop(self._loads[load_id])

    def _hand_over(self, saves: Sequence[BlockSave]) -> None:
        if saves:
            names = tuple(save.name for save in saves)
            ids = torch.tensor([save.block_id for save in saves], device=self._pool.device)
            self._being_written.update(names)
            self._to_write.put((names, self._pool.data[:, ids].cpu()))  # [L, N, block bytes]

    # -- the end -------------------------------------------------------------------------------------------------

    def keep(self, blocks: Sequence[BlockSave], seconds: float) -> int:
        """No step runs any more: write as many of these blocks as can be within `seconds`. Returns how many."""
        end = self._clock() + seconds
        done = 0
        step = max(1, (16 << 20) // self._block_bytes)
        wanted = [save for save in blocks if not self.stores(save.name)]
        for first in range(0, len(wanted), step):
            while self._being_written and self._clock() < end:
                time.sleep(0.001)
            if self._clock() >= end:
                break
            some = wanted[first : first + step]
            self._hand_over(some)
            done += len(some)
        return done

    def close(self, seconds: float = 5.0) -> None:
        """Write what waits to be written, within `seconds`, and end."""
        self._closing = True
        self._to_read.put(None)
        self._to_write.put(None)
        with self._staged_changed:
            self._staged_changed.notify_all()
        for thread in self._threads:
            thread.join(seconds)
        self._filler.shutdown()
        if not any(thread.is_alive() for thread in self._threads):  # else the disk hangs: the process ends without it
            for tier in self._tiers:
                tier.close()

    # -- the reader's thread -------------------------------------------------------------------------------------

    def _read_loads(self) -> None:
        while (load := self._to_read.get()) is not None:
            if self._may_stage(load):
                self._read_load(load)
            with self._queued_lock:
                self._queued_blocks -= len(load.names)

    def _may_stage(self, load: _Load) -> bool:
        """Wait until there is room for what the load stages; False when it is not wanted any more."""
        num_bytes = len(load.names) * self._block_bytes
        with self._staged_changed:
            while not self._closing and load.num_settled is None:
                if self._staged_bytes == 0 or self._staged_bytes + num_bytes <= _MAX_STAGED_BYTES:
                    break
                self._staged_changed.wait(0.05)
        with load.lock:
            if self._closing or load.num_settled is not None:
                return False
            load.staged = torch.empty(
                (len(load.names), self._pool.data.shape[0], self._pool.layout.block_bytes), dtype=torch.uint8
            )
            self._staged_bytes += num_bytes
            return True

    def _read_load(self, load: _Load) -> None:
        staged = load.staged
        assert staged is not None
        began = told = self._clock()
        for index, name in enumerate(load.names):
            if load.num_settled is not None or self._closing:
                return
            into = staged[index].view(-1).numpy().data
            if not any(tier.read(name, into) for tier in self._tiers):
                self._tell(KVArrival(load.load_id, index, True))
                return
            now = self._clock()
            self._learn(now, (now - began) / ((index + 1) * self._block_bytes), last=index + 1 == len(load.names))
            if now - told > _NOTICE_SECONDS and index + 1 < len(load.names):
                told = now
                self._tell(KVArrival(load.load_id, index + 1, False))
        self._tell(KVArrival(load.load_id, len(load.names), True))

    def _learn(self, now: float, seconds_per_byte: float, *, last: bool) -> None:
        """A load shows how fast the tiers are: at its end, or as soon as it is slower than was thought."""
        if last or seconds_per_byte > 2 * self._seconds_per_byte:
            self._seconds_per_byte += _RATE * (seconds_per_byte - self._seconds_per_byte)
            self._measured_at = now

    def _tell(self, arrival: KVArrival) -> None:
        self._arrivals.put(arrival)
        self._arrived.set()
        self._on_arrival()

    def _drop(self, load: _Load) -> None:
        """What is staged is not needed any more."""
        if self._loads.pop(load.load_id, None) is not None and load.staged is not None:
            with self._staged_changed:
                self._staged_bytes -= load.staged.nbytes
                self._staged_changed.notify_all()

    # -- the writer's thread -------------------------------------------------------------------------------------

    def _write_blocks(self) -> None:
        while (entry := self._to_write.get()) is not None:
            names, content = entry
            blocks = content.transpose(0, 1).contiguous()  # [N, L, block bytes]
            for name, block in zip(names, blocks, strict=True):
                self._tiers[0].put(name, block.view(-1).numpy().data)
                self._being_written.discard(name)

    def _is_kept(self, name: bytes) -> bool:
        return any(name in tier for tier in self._tiers)
