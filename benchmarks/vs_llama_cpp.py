"""Prefill and decode against llama.cpp: the same weights in F32, the same threads, in one run, in turn.

Each side is a process of its own, since llama-cpp-python has its own environment; in every round each side computes
each length once, on the same fresh random tokens, and who begins alternates. llama.cpp runs with and without flash
attention, and the better of the two medians counts. Ours is the whole engine, from request to first sampled token.

    python benchmarks/vs_llama_cpp.py --make-env ~/.cache/llama-env      # once; builds for about ten minutes
    python benchmarks/vs_llama_cpp.py --llama-python ~/.cache/llama-env/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import venv
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from _verdict import Bar, finish, run_main, show
from gguf_to_f32 import convert

from headstart.config import DEFAULT_MODEL
from headstart.hub import resolve
from headstart.perf.model_spec import read_model_spec

HERE = Path(__file__).parent
LLAMA_CPP_PYTHON = "llama-cpp-python==0.3.36"
BARS = {512: 1.0, 2048: 1.3}  # our prefill tokens a second over llama.cpp's, at least
SIDES = ("headstart", "llama.cpp", "llama.cpp flash")


class Side:
    """One engine in its own process: JSON lines in, JSON lines out."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        # In a session of its own, so that Ctrl-C reaches this process only, whose end of the pipe is what ends a side.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True
        )
        self._read()

    def measure(self, token_ids: list[int], num_decode: int) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"token_ids": token_ids, "num_decode": num_decode}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a side ended with code {self._process.wait()}; its own output says why")
        answer: dict[str, float] = json.loads(line)
        return answer

    def __enter__(self) -> Side:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def make_env(folder: Path) -> Path:
    """A virtual environment with llama-cpp-python, built for this machine. Returns its Python."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        subprocess.run(
            [python, "-m", "pip", "install", "--no-binary", "llama-cpp-python", LLAMA_CPP_PYTHON], check=True
        )
    return python


def f32_model(model: str, folder: Path) -> Path:
    """The model's weights as an F32 GGUF in `folder`; made once."""
    source = resolve(model, progress=None).weights[0]
    if source.suffix != ".gguf":
        raise SystemExit(f"{model} is no GGUF; llama.cpp needs one")
    target = folder / f"{source.stem}.F32.gguf"
    if not target.exists():
        print(f"writing {target}", file=sys.stderr)
        partial = target.with_suffix(".partial")
        convert(source, partial)
        partial.rename(target)
    return target


def start(name: str, llama_python: str, model: str, f32: Path, threads: int, n_ctx: int) -> Side:
    env = os.environ | {"OMP_NUM_THREADS": str(threads)}
    if name == "headstart":
        options: dict[str, Any] = {"model": model, "threads": threads}
        return Side([sys.executable, str(HERE / "_headstart_side.py"), json.dumps(options)], env)
    options = {"model": str(f32), "threads": threads, "n_ctx": n_ctx, "flash_attn": "flash" in name}
    env = {key: value for key, value in env.items() if key != "PYTHONPATH"}
    return Side([llama_python, str(HERE / "_llama_side.py"), json.dumps(options)], env)


def take_rounds(
    sides: dict[str, Side], lengths: list[int], num_decode: int, rounds: int, vocab_size: int
) -> dict[str, dict[str, list[float]]]:
    """Tokens a second: by side, by `prefill LENGTH` and `decode`, one value a round. An unmeasured round warms up."""
    rng = random.Random()
    found: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
    for index in range(-1, rounds):
        for length in lengths:
            token_ids = [rng.randrange(vocab_size) for _ in range(length)]
            order = list(sides) if index % 2 else list(sides)[::-1]
            for name in order:
                times = sides[name].measure(token_ids, num_decode if length == lengths[0] else 0)
                if index < 0:
                    continue
                found[name].setdefault(f"prefill {length}", []).append(length / times["prefill_s"])
                if length == lengths[0]:
                    found[name].setdefault("decode", []).append(num_decode / times["decode_s"])
    return found


def compare(found: dict[str, dict[str, list[float]]]) -> tuple[list[list[str]], dict[str, Any], list[Bar]]:
    """Table rows, results and bars."""
    medians = {name: {what: statistics.median(values) for what, values in each.items()} for name, each in found.items()}
    rows: list[list[str]] = []
    bars: list[Bar] = []
    ratios: dict[str, float] = {}
    for what, ours in medians["headstart"].items():
        theirs = max(medians[name][what] for name in found if name != "headstart")
        ratios[what] = ours / theirs
        rows.append([what, *(f"{medians[name][what]:.1f}" for name in found), f"{ratios[what]:.2f}"])
        limit = next((limit for length, limit in BARS.items() if what == f"prefill {length}"), None)
        if limit is not None:
            bars.append(Bar(f"{what}, ours over llama.cpp's best", ratios[what], limit, at_most=False))
    return rows, {"tokens_per_s": medians, "ratios": ratios, "rounds": found}, bars


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-python", help="Python of an environment that has llama-cpp-python")
    parser.add_argument("--make-env", type=Path, metavar="DIR", help="make that environment there if it is not, use it")
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"alias or GGUF file (default {DEFAULT_MODEL})")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: the cores there are"
    )
    parser.add_argument("--lengths", default="128,512,2048", help="prompt tokens (default 128,512,2048)")
    parser.add_argument("--decode", type=int, default=64, help="tokens to decode after the shortest (default 64)")
    parser.add_argument("--rounds", type=int, default=5, help="default 5; medians count")
    parser.add_argument("--work-dir", type=Path, default=Path(tempfile.gettempdir()), help="for the F32 file (540 MB)")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    args = parser.parse_args()
    if not args.llama_python and not args.make_env:
        parser.error("give --llama-python PATH or --make-env DIR")
    llama_python = args.llama_python or str(make_env(args.make_env))
    lengths = sorted(int(text) for text in args.lengths.split(","))
    f32 = f32_model(args.model, args.work_dir)
    vocab_size = read_model_spec(resolve(args.model, progress=None)).vocab_size
    n_ctx = max(lengths) + args.decode + 64
    with ExitStack() as stack:
        sides = {
            name: stack.enter_context(start(name, llama_python, args.model, f32, args.threads, n_ctx)) for name in SIDES
        }
        found = take_rounds(sides, lengths, args.decode, args.rounds, vocab_size)
    rows, results, bars = compare(found)
    show(f"Tokens/s, F32, {args.threads} threads, median of {args.rounds}", ("", *found, "ratio"), rows, bars)
    return finish(args.json, results, bars)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
