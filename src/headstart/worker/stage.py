"""Made-up requests for steps that nobody asked for: the warm-up's and the calibration's.

Owns the pool's blocks meanwhile, and the running number of steps; knows nothing of why a step is wanted. Attention may
read keys and values that no forward pass wrote: tokens count as cached, and the pool's zeros are as good as any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headstart.core.request import SamplingParams
from headstart.core.step import NewRequestData, ScheduledChunk, SchedulerOutput


@dataclass(slots=True)
class Player:
    """A made-up request. `num_tokens`: known so far, of which the last ones are computed next."""

    name: str
    num_tokens: int
    params: SamplingParams
    blocks: tuple[int, ...]


class Stage:
    """The pool's blocks, dealt anew after each `end`, and the running number of steps."""

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._used = 0
        self._live: dict[str, None] = {}  # names, in order
        self._step_id = 0

    @property
    def room(self) -> int:
        """Tokens, known and to come, that one more request may have at most."""
        return min((self._num_blocks - self._used) * self._block_size, self._max_model_len)

    def deal(self, name: str, wanted: int, *, spare: int, params: SamplingParams) -> Player | None:
        """A request with blocks for its prompt and `spare` tokens more; smaller where that does not fit, or None."""
        room = self.room
        num_tokens = min(wanted, room - 1)
        if num_tokens < 1:
            return None
        end = self._used - -min(num_tokens + max(spare, 1), room) // self._block_size
        player = Player(name, num_tokens, params, tuple(range(self._used, end)))
        self._used = end
        return player

    def has_room(self, player: Player) -> bool:
        return player.num_tokens <= min(len(player.blocks) * self._block_size, self._max_model_len)

    def step(self, chunks: Sequence[tuple[Player, int]], *, silent: Sequence[Player] = ()) -> SchedulerOutput:
        """Compute the last `count` known tokens of each request and sample the next one, but for those in `silent`."""
        new = [player for player, _ in chunks if player.name not in self._live]
        found = SchedulerOutput(
            step_id=self._next_id(),
            new_requests=tuple(NewRequestData(each.name, (0,) * each.num_tokens, each.params) for each in new),
            chunks=tuple(self._chunk(player, count, player not in silent) for player, count in chunks),
            finished_request_ids=(),
        )
        self._live |= {player.name: None for player in new}
        for player, _ in chunks:
            player.num_tokens += player not in silent
        return found

    def end(self) -> SchedulerOutput:
        """All requests are finished and all blocks free."""
        finished, self._live, self._used = tuple(self._live), {}, 0
        return SchedulerOutput(self._next_id(), (), (), finished)

    def _chunk(self, player: Player, count: int, samples: bool) -> ScheduledChunk:
        known = player.name in self._live  # and so its blocks are
        return ScheduledChunk(
            player.name,
            player.num_tokens - count,
            count,
            block_offset=len(player.blocks) if known else 0,
            block_ids=() if known else player.blocks,
            samples=samples,
        )

    def _next_id(self) -> int:
        self._step_id += 1
        return self._step_id
