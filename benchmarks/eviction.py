"""How much of the prompts the prefix cache gives back: eviction policies at several sizes, on traces and made loads.

The engine's own `KVCacheManager`, one request after the other in order of arrival: match, allocate, index, release.
Four loads. `mooncake`: a production chat service's trace (blocks of 512 tokens, answers unknown). `agents`: real agent
sessions, message by message, interleaved, blocks of 16 words. `chats`: made conversations of several turns over a few
system prompts, with bursts of prompts that nobody repeats. `one-offs`: requests as long as those of the Azure code
trace behind one of three system prompts, the rest of each unique. The cache's size is in tokens (words for `agents`).
Shown is the share of prompt tokens that hit. The bars: the default policy beats LRU on the trace at the three sizes
that matter, and loses nowhere more than 2 % of LRU's hits.

    python benchmarks/eviction.py
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from _verdict import Bar, finish, run_main, show

from headstart.core.eviction import AgedFrequency, EvictionPolicy, LeastRecentlyUsed
from headstart.core.kv_cache_manager import KVCacheManager
from headstart.core.request import EngineRequest, Request, SamplingParams

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
HORIZON = 32_768  # tokens, as of models between 7 and 70 billion parameters; see `AgedFrequency`
# Times LRU's share of hits. At 256,000 tokens nearly all of that, 4.25 %, is the one block that all prompts share.
TRACE_BARS = {256_000: 1.04, 1_024_000: 1.3, 5_120_000: 1.04}
WORST = 0.98  # nowhere may it lose more than that
_PARAMS = SamplingParams(max_tokens=1)


@dataclass(frozen=True, slots=True)
class Prompt:
    """`blocks`: one number for each block; `num_tokens` in all, the last block may be partial."""

    blocks: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    block_tokens: int
    sizes: tuple[int, ...]  # of the cache, in tokens
    prompts: list[Prompt]


def mooncake() -> Load:
    lines = (DATA / "traces" / "mooncake_conversation.jsonl").read_text().splitlines()
    entries = sorted(map(json.loads, lines), key=lambda entry: entry["timestamp"])
    prompts = [Prompt(tuple(entry["hash_ids"]), entry["input_length"]) for entry in entries]
    return Load("mooncake", 512, (256_000, 512_000, 1_024_000, 2_560_000, 5_120_000, 10_240_000, 25_600_000), prompts)


def agents() -> Load:
    """Four runs of each session under way at once, each run with a task of its own after the shared instructions."""
    rng = random.Random(1)
    sessions = []
    for path in sorted((DATA / "prompts" / "swe-agent").glob("*.traj")):
        texts = [str(message["content"]) for message in json.loads(path.read_text())["history"]]
        head, *rest = texts
        sessions += [[head, f"run {run}", *rest] for run in range(4)]
    turns = [list(_turns(texts)) for texts in sessions]
    order = [index for index, prompts in enumerate(turns) for _ in prompts]
    rng.shuffle(order)
    return Load("agents", 16, (8_000, 16_000, 32_000, 64_000), [turns[index].pop(0) for index in order])


def _turns(texts: list[str]) -> Iterator[Prompt]:
    words: list[str] = []
    for text in texts:
        words += text.split()
        yield Prompt(tuple(_numbers(words)), len(words))


def _numbers(words: list[str]) -> Iterator[int]:
    for start in range(0, len(words), 16):
        yield int.from_bytes(" ".join(words[start : start + 16]).encode())


def chats() -> Load:
    """Conversations over eight system prompts; after every 500 requests a burst of 150 prompts that nobody repeats."""
    rng = random.Random(2)
    fresh = itertools.count(1)
    systems = [[next(fresh) for _ in range(rng.choice((16, 32, 64)))] for _ in range(8)]
    active: list[list[int]] = []
    prompts: list[Prompt] = []
    while len(prompts) < 6_000:
        if len(prompts) % 650 >= 500:
            blocks = [next(fresh) for _ in range(rng.randrange(20, 120))]
        else:
            if len(active) < 40 or rng.random() < 0.2:
                active.append([*rng.choices(systems, weights=[8, 6, 4, 3, 2, 1, 1, 1])[0]])
                blocks = active[-1]
            else:
                blocks = active[int(len(active) * (1 - rng.random() ** 2))]  # mostly one of the latest
            blocks += [next(fresh) for _ in range(rng.randrange(2, 12))]
        prompts.append(Prompt((*blocks, next(fresh)), 16 * len(blocks) + 8))
    return Load("chats", 16, (16_000, 64_000, 256_000), prompts)


def one_offs() -> Load:
    rng = random.Random(3)
    fresh = itertools.count(1)
    systems = [[next(fresh) for _ in range(count)] for count in (32, 64, 128)]
    with (DATA / "traces" / "AzureLLMInferenceTrace_code.csv").open(newline="") as file:
        lengths = [int(row["ContextTokens"]) for row in csv.DictReader(file)]
    prompts = []
    for length in lengths:
        unique = [next(fresh) for _ in range(length // 16 + 1)]
        shared = rng.choice(systems) if rng.random() < 0.1 else []
        prompts.append(Prompt((*shared, *unique), 16 * len(shared) + length))
    return Load("one-offs", 16, (16_000, 64_000, 256_000), prompts)


def hit_share(load: Load, num_tokens: int, policy: EvictionPolicy) -> float:
    """Share of prompt tokens found in a cache of `num_tokens`. A block is one token to the manager: its number."""
    kv = KVCacheManager(
        num_blocks=num_tokens // load.block_tokens + 1, block_size=1, prefix_cache=True, eviction=policy
    )
    total = hits = 0
    for index, prompt in enumerate(load.prompts):
        # One more, for the last token of a prompt is never looked up; its block is the spare one.
        request = Request(EngineRequest(str(index), (*prompt.blocks, -1), _PARAMS, 0.0), len(prompt.blocks) + 2)
        matched = kv.match(request)
        if not kv.allocate_prompt(request, matched, spare=0):
            continue  # larger than the whole cache
        kv.index(request, len(prompt.blocks))
        kv.release(request)
        total += prompt.num_tokens
        hits += min(prompt.num_tokens, len(matched) * load.block_tokens)
    return hits / total


Maker = Callable[[int, int], EvictionPolicy]
POLICIES: dict[str, Maker] = {
    "lru": lambda num_blocks, block_tokens: LeastRecentlyUsed(),
    "aged frequency": lambda num_blocks, block_tokens: AgedFrequency(
        num_blocks=num_blocks, horizon=HORIZON / block_tokens
    ),
}


def measure(load: Load, policies: Iterable[str]) -> Iterator[tuple[int, dict[str, float]]]:
    for size in load.sizes:
        num_blocks = size // load.block_tokens
        yield size, {name: hit_share(load, size, POLICIES[name](num_blocks, load.block_tokens)) for name in policies}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    args = parser.parse_args()
    rows: list[list[str]] = []
    bars: list[Bar] = []
    results: dict[str, dict[str, float]] = {}
    for load in (mooncake(), agents(), chats(), one_offs()):
        for size, shares in measure(load, POLICIES):
            ratio = shares["aged frequency"] / shares["lru"]
            name = f"{load.name}, {size:,} tokens"
            results[name] = shares
            rows.append([name, *(f"{share:.2%}" for share in shares.values()), f"{ratio:.2f}"])
            limit = TRACE_BARS.get(size, WORST) if load.name == "mooncake" else WORST
            bars.append(Bar(f"{name}, hits over LRU's", ratio, limit, at_most=False))
    show("Prompt tokens found in the prefix cache", ("load, size of the cache", *POLICIES, "ratio"), rows, bars)
    return finish(args.json, results, bars)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
