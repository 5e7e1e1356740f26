"""What the core says of itself: counts since the start, and the whole of it at one moment. Owns no counting."""

from __future__ import annotations

from dataclasses import dataclass

from headstart.core.connector import TierState

# Upper bounds of the classes in which steps are counted by the prompt tokens that they compute; one more is above all.
PREFILL_STEP_TOKENS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)


@dataclass(slots=True)
class CoreCounters:
    """What happened since the start; never decreases."""

    steps: int = 0
    prompt_tokens_computed: int = 0  # tokens of prefill chunks, recomputation after preemption included
    prompt_tokens_cached: int = 0
    prompt_tokens_loaded: int = 0  # from a tier; among those cached
    loads: int = 0
    loads_cut_short: int = 0  # they did not keep pace with recomputing, or failed
    generated_tokens: int = 0
    preemptions: int = 0
    aborts: int = 0  # taken back: the client left, or its text was complete (a stop string)
    finished: int = 0


@dataclass(frozen=True, slots=True)
class CoreStats:
    """The core at one moment. Blocks: `num_free_blocks` can be allocated now; the rest is held by requests.

    `prefill_steps[i]`: steps since the start that computed at most `PREFILL_STEP_TOKENS[i]` prompt tokens, and more
    than the class before; those without any are in none.
    `step_ratios`: steps by predicted over real time, in the buckets of `core.accuracy`; and the ratios' sum.
    `tier_dropped_blocks`: since the start, blocks that left the prefix cache faster than a tier could keep them.
    """

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_cached_blocks: int
    num_blocks: int
    evicted_blocks: int  # from the prefix cache, since the start
    steps: int
    prompt_tokens_computed: int
    prompt_tokens_cached: int
    generated_tokens: int
    preemptions: int
    aborts: int
    finished: int
    prefill_steps: tuple[int, ...]
    step_ratios: tuple[int, ...] = ()
    step_ratios_sum: float = 0.0
    num_loading: int = 0  # requests that wait for KV from a tier
    prompt_tokens_loaded: int = 0
    loads: int = 0
    loads_cut_short: int = 0
    tiers: tuple[TierState, ...] = ()
    tier_dropped_blocks: int = 0
