"""The disk tier against its promises: prefixes survive restarts, kills serve nothing wrong, a slow disk costs little.

- `restart`: a prefix of 4,000 tokens, computed; the server is stopped and started again; the prefix again: the time to
  its first token against the first time's, and the ledger's `load`.
- `kill`: a server whose evicted blocks are being written is killed (SIGKILL to its engine), 20 times over one folder;
  each new one must answer all prompts with the cold run's tokens.
- `slow`: the same engine in this process on a disk that reads so many megabytes a second, or stops altogether: the
  time to the first token of a stored prompt against recomputing one as long.

The machine should do nothing else: client and servers share its cores already.

    python benchmarks/disk_tier.py
    python benchmarks/disk_tier.py --only slow
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from _verdict import Bar, finish, run_main, show

import headstart.worker.tiers
from headstart import LLM
from headstart.cli.client import Answer, ServerError
from headstart.cli.local_server import LocalServer
from headstart.config import DEFAULT_MODEL
from headstart.core.request import SamplingParams
from headstart.kv.tiers import DiskTier

PREFIX_TOKENS = 4000
RESTART_BAR, SLOW_BAR = 0.3, 1.1
ONE = SamplingParams(max_tokens=1, temperature=0.0)
KV_BYTES_PER_TOKEN = 23_040  # of the default model, in float16
POOL_BYTES = "100MB"  # of the servers that are killed: some 270 blocks, so that prompts push each other out
NUM_PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 6, 1000, 12
RATES_MB = (1000.0, 200.0, 60.0, 20.0, 5.0, 1.0)
STALLS_AFTER = 40  # blocks
_WORDS = ("time river stone light paper mountain small green quiet early window letter garden winter road").split()  # noqa: SIM905


def text_of(seed: int, words: int) -> str:
    rng = random.Random(seed)
    return f"{seed} " + " ".join(rng.choice(_WORDS) for _ in range(words))


def ask(server: LocalServer, prompt: str, tokens: int) -> Answer:
    messages = [{"role": "user", "content": prompt}]
    return server.client.chat(server.model, messages, max_tokens=tokens, temperature=0)


def restart(model: str, repeats: int) -> tuple[list[list[str]], list[Bar], Any]:
    """A prefix before and after a restart; on another folder each time."""
    colds, warms, answer = [], [], None
    for repeat in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            prompt, flags = text_of(repeat, PREFIX_TOKENS - 80), ["--kv-disk", folder]
            with LocalServer(model, flags) as server:
                colds.append(ask(server, prompt, 1).ttft)
            with LocalServer(model, flags) as server:
                answer = ask(server, prompt, 1)
            if "load" not in dict(answer.timing):
                raise ServerError("nothing was loaded after the restart")
            warms.append(answer.ttft)
    assert answer is not None
    ratio = statistics.median(warm / cold for warm, cold in zip(warms, colds, strict=True))
    loaded = f"{answer.num_cached_tokens:,} of {answer.num_prompt_tokens:,} tokens loaded"
    row = ["restart", loaded, milliseconds(colds), milliseconds(warms), f"{ratio:.3f}"]
    bar = Bar("a stored prefix of 4,000 tokens after a restart over computing it", ratio, RESTART_BAR, True)
    return [row], [bar], {"computed": colds, "loaded": warms}


def kill(model: str, kills: int) -> tuple[list[list[str]], list[Bar], Any]:
    """Kill servers while they write; whatever they left must give the cold run's answers."""
    prompts = [text_of(100 + index, PROMPT_TOKENS) for index in range(NUM_PROMPTS)]
    with LocalServer(model, ["--no-prefix-cache"]) as server:
        expected = [ask(server, prompt, ANSWER_TOKENS).text for prompt in prompts]
    wrong = loaded = during_writes = 0
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--kv-disk", folder, "--kv-cache-memory", POOL_BYTES, "--max-model-len", "2048"]
        for number in range(kills + 1):
            rng = random.Random(number)
            with LocalServer(model, flags) as server:
                for index in rng.sample(range(NUM_PROMPTS), NUM_PROMPTS):
                    answer = ask(server, prompts[index], ANSWER_TOKENS)
                    wrong += answer.text != expected[index]
                    loaded += "load" in dict(answer.timing)
                if number < kills:
                    during_writes += kill_while_writing(server, Path(folder), number)
    found = f"{during_writes} of {kills} kills while a file grew, {loaded} prompts loaded"
    bars = [
        Bar("kills in mid-write", during_writes, kills, False),
        Bar("answers unlike the cold run's after kills", wrong, 0, True),
        Bar("prompts that were loaded from what was left", loaded, 1, False),
    ]
    return [["kill", found, "", "", str(wrong)]], bars, {"wrong": wrong, "loaded": loaded, "during": during_writes}


def kill_while_writing(server: LocalServer, folder: Path, number: int) -> bool:
    """Push new blocks out by newer ones, and kill the engine as soon as a file grows. Whether one did."""
    for new in range(2):
        ask(server, text_of(1000 + 10 * number + new, 1800), 1)
    before = size_of(folder)
    flood = threading.Thread(target=ask_in_vain, args=(server, text_of(1005 + 10 * number, 1800)))
    flood.start()
    end = time.monotonic() + 20
    while (grew := size_of(folder) != before) is False and flood.is_alive() and time.monotonic() < end:
        pass  # to sleep would be to miss the moment
    for child in children_of(server.pid):
        os.kill(child, signal.SIGKILL)
    flood.join()
    return grew


def ask_in_vain(server: LocalServer, prompt: str) -> None:
    with contextlib.suppress(ServerError, OSError):  # the engine is killed meanwhile
        ask(server, prompt, 1)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.kvseg"))


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class SlowDisk(DiskTier):
    """Reads no faster than `seconds_per_block`, and not at all after `stalls_after` blocks."""

    seconds_per_block = 0.0
    stalls_after = sys.maxsize

    def read(self, name: bytes, into: memoryview) -> bool:
        if SlowDisk.stalls_after <= 0:
            time.sleep(60)
        SlowDisk.stalls_after -= 1
        time.sleep(SlowDisk.seconds_per_block)
        return super().read(name, into)


def slow(model: str) -> tuple[list[list[str]], list[Bar], Any]:
    """Stored prompts against new ones of the same length, in turns, on disks of several speeds."""
    headstart.worker.tiers.DiskTier = SlowDisk  # type: ignore[misc]
    speeds = [(f"{rate:g} MB/s", rate, sys.maxsize) for rate in RATES_MB]
    speeds.append((f"stops after {STALLS_AFTER} blocks", 1000.0, STALLS_AFTER))
    rows, ratios = [], []
    with tempfile.TemporaryDirectory() as folder:
        prompts = [token_ids(index) for index in range(len(speeds))]
        for some in (prompts[:4], prompts[4:]):
            with LLM(model, kv_disk=folder) as llm:
                llm.generate(some, ONE)
        for (name, rate, stalls_after), stored in zip(speeds, prompts, strict=True):
            with LLM(model, kv_disk=folder) as llm:
                SlowDisk.seconds_per_block = llm.info.block_size * KV_BYTES_PER_TOKEN / (rate * 1e6)
                SlowDisk.stalls_after = stalls_after
                before = seconds_of(llm, token_ids(1000 + len(ratios)))
                found = seconds_of(llm, stored)
                after = seconds_of(llm, token_ids(2000 + len(ratios)))
                computed = (before + after) / 2
                stats = llm.stats()
            ratios.append(found / computed)
            loaded = f"{stats.prompt_tokens_loaded:,} of {PREFIX_TOKENS:,} tokens loaded"
            rows.append([f"slow: {name}", loaded, milliseconds([computed]), milliseconds([found]), f"{ratios[-1]:.3f}"])
    bar = Bar("a stored prompt on the worst disk over recomputing it", max(ratios), SLOW_BAR, True)
    return rows, [bar], dict(zip([name for name, _, _ in speeds], ratios, strict=True))


def token_ids(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 30_000) for _ in range(PREFIX_TOKENS)]


def seconds_of(llm: LLM, prompt: list[int]) -> float:
    began = time.perf_counter()
    llm.generate([prompt], ONE)
    return time.perf_counter() - began


def milliseconds(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1000:,.0f} ms"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--only", default="restart,kill,slow", help="parts, by comma")
    parser.add_argument("--repeats", type=int, default=3, help="of the restart")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    parts = {
        "restart": lambda: restart(args.model, args.repeats),
        "kill": lambda: kill(args.model, args.kills),
        "slow": lambda: slow(args.model),
    }
    wanted = args.only.split(",")
    if unknown := [name for name in wanted if name not in parts]:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(parts)}")
    rows: list[list[str]] = []
    bars: list[Bar] = []
    results: dict[str, Any] = {}
    for name in wanted:
        more, its_bars, results[name] = parts[name]()
        rows += more
        bars += its_bars
    show("Disk tier", ["part", "what", "computed", "loaded", "ratio or errors"], rows, bars)
    return finish(args.json, results, bars)


if __name__ == "__main__":
    sys.exit(run_main(main))
