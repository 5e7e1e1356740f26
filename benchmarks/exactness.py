"""Does an answer depend on how it was served? Greedy answers alone, against the same ones in company, chunks and cache.

Each prompt is first served alone: cold, whole, one step in flight. Then all are served together in several ways, and
each answer is compared token by token. Where two part, the tokens that they chose were a near-tie or were not: shown is
how far apart the two were when served alone (`gap`), beside how much log-probabilities moved before that (`noise`).
By our kernels (float32 and bfloat16 on a CPU) nothing may differ at all. Otherwise answers may part, but at near-ties
only.

    python benchmarks/exactness.py --dtype bfloat16
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from _verdict import Bar, finish, run_main, show

from headstart.bench.questions import read_questions
from headstart.config import DEFAULT_MODEL, CacheConfig, Config, ModelConfig, SchedulerConfig
from headstart.core.cost import LinearCosts
from headstart.core.engine_core import EngineCore
from headstart.core.request import EngineRequest, SamplingParams
from headstart.core.step import TokenLogprob
from headstart.engine.inprocess import InProcessEngine
from headstart.hub import resolve
from headstart.perf.model_spec import read_model_spec
from headstart.replica import build_engine
from headstart.text import Tokenizer

BLOCK_SIZE = 16
TIE_BAR = 0.5  # logits; half-precision rounding moves the logits of the default model by less
# Served together: tokens of prefill a step, beside decodes, and steps in flight. The last two find the first's cache.
WAYS = {
    "together": SchedulerConfig(max_num_seqs=16, pipeline_depth=1),
    "chunks of 48": SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=16, pipeline_depth=1),
    "chunks of 7, warm": SchedulerConfig(max_num_batched_tokens=23, max_num_seqs=16, pipeline_depth=2),
}
Answer = list[TokenLogprob]


@dataclass(frozen=True, slots=True)
class Compared:
    """All answers of one way against those alone."""

    same: int
    gaps: list[float]  # of those that parted: how far apart the two tokens were when served alone; inf: not in its top
    noise: float  # largest difference of the log-probability of a token that both chose after the same text


def compare(alone: Sequence[Answer], found: Sequence[Answer]) -> Compared:
    gaps: list[float] = []
    noise = 0.0
    for reference, answer in zip(alone, found, strict=True):
        for mine, other in zip(reference, answer, strict=True):
            if mine.token_id != other.token_id:
                gaps.append(mine.logprob - dict(mine.top).get(other.token_id, -float("inf")))
                break
            noise = max(noise, abs(mine.logprob - other.logprob))
    return Compared(len(alone) - len(gaps), gaps, noise)


def serve(engine: InProcessEngine, name: str, prompts: Sequence[tuple[int, ...]], num_tokens: int) -> list[Answer]:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, logprobs=5)
    now = time.monotonic()
    requests = [EngineRequest(f"{name} {index}", prompt, params, now) for index, prompt in enumerate(prompts)]
    answers: dict[str, Answer] = {request.request_id: [] for request in requests}
    for output in engine.run(requests):
        answers[output.request_id] += output.logprobs
    return list(answers.values())


def make_prompts(tokenizer: Tokenizer, count: int, longest: int) -> list[tuple[int, ...]]:
    """Questions, three to a prompt; every other prompt begins as the one before it does."""
    turns = [turn for talk in read_questions(None, count + 3) for turn in talk]
    prompts = []
    for index in range(count):
        first = index // 2 * 2
        text = " ".join((*turns[first : first + 2], turns[index + 2]))
        prompts.append(tuple(tokenizer.encode(text))[:longest])
    return prompts


def measure(args: argparse.Namespace) -> tuple[dict[str, Compared], str]:
    files = resolve(args.model, progress=None)
    config = Config(
        model=ModelConfig(model=args.model, dtype=args.dtype, threads=args.threads),
        cache=CacheConfig(
            block_size=BLOCK_SIZE, kv_cache_memory=args.kv_cache_memory, kv_cache_dtype=args.kv_cache_dtype
        ),
    )
    prompts = make_prompts(Tokenizer.load(files), args.prompts, args.longest)
    built = build_engine(config, files, read_model_spec(files))

    def engine_of(scheduler: SchedulerConfig, *, prefix_cache: bool) -> InProcessEngine:
        core = EngineCore(
            scheduler,
            LinearCosts(step=0.01),  # whatever is in a step: rows alone bound it
            num_blocks=built.info.num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=built.info.max_model_len,
            prefix_cache=prefix_cache,
        )
        return InProcessEngine(core, built.executor)

    try:
        whole = SchedulerConfig(max_num_batched_tokens=2048, pipeline_depth=1)
        quiet = engine_of(whole, prefix_cache=False)
        alone = [serve(quiet, f"alone {index}", [prompt], args.tokens)[0] for index, prompt in enumerate(prompts)]
        found = {}
        for way, scheduler in WAYS.items():
            engine = engine_of(scheduler, prefix_cache=True)
            if "warm" in way:
                serve(engine, f"{way} first", prompts, args.tokens)
            found[way] = compare(alone, serve(engine, way, prompts, args.tokens))
    finally:
        built.executor.shutdown()
    return found, built.info.summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"alias, folder or GGUF file (default {DEFAULT_MODEL})")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--prompts", type=int, default=12, help="default 12")
    parser.add_argument("--longest", type=int, default=200, help="tokens a prompt at most (default 200)")
    parser.add_argument("--tokens", type=int, default=48, help="tokens an answer (default 48)")
    parser.add_argument("--threads", type=int, help="default: the cores there are")
    parser.add_argument("--kv-cache-memory", type=int, default=512 << 20, metavar="BYTES", help="default 512 MiB")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    args = parser.parse_args()
    found, summary = measure(args)
    rows, bars = [], []
    for way, compared in found.items():
        widest = max(compared.gaps, default=0.0)
        rows.append([way, f"{compared.same}/{args.prompts}", f"{widest:.4f}", f"{compared.noise:.2g}"])
        if args.dtype in ("float32", "bfloat16"):
            bars.append(Bar(f"{way}: answers that differ", len(compared.gaps), 0, at_most=True))
            bars.append(Bar(f"{way}: difference of a log-probability", compared.noise, 0, at_most=True))
        else:
            bars.append(Bar(f"{way}: gap of the tokens where answers part", widest, TIE_BAR, at_most=True))
    print(summary)
    show(
        f"{args.prompts} answers of {args.tokens} tokens",
        ("served", "same as alone", "widest gap", "noise"),
        rows,
        bars,
    )
    results = {way: {"same": each.same, "gaps": each.gaps, "noise": each.noise} for way, each in found.items()}
    return finish(args.json, results, bars)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
