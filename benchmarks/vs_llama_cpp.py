"""Prefill and decode against llama.cpp on the same threads, in one run, in turn: F32 against F32, default against best.

Each side is a process of its own, since llama-cpp-python has its own environment; in every round each side computes
each length once, on the same fresh random tokens, and who begins alternates. llama.cpp runs in four formats made from
the same F32 weights, with and without flash attention; of those that a line names, the best median counts. Ours is the
whole engine, from request to first sampled token: in float32, in int8 made from the same F32 weights, and as by
default (the model's own 4-bit blocks).

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
from dataclasses import dataclass
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
LLAMA_FORMATS = ("f32", "f16", "q8_0", "q4_0")


@dataclass(frozen=True)
class Contestant:
    """One side: our engine with a quantization, or llama.cpp with a format of the weights."""

    name: str
    ours: bool
    format: str  # of the weights: our --quantization, or llama.cpp's name
    flash: bool = False


CONTESTANTS = (
    Contestant("default", True, "auto"),
    Contestant("int8", True, "int8"),
    Contestant("float32", True, "none"),
    *(
        Contestant(f"llama {name}{' fa' if flash else ''}", False, name, flash)
        for name in LLAMA_FORMATS
        for flash in (False, True)
    ),
)


@dataclass(frozen=True)
class Rule:
    """Our tokens a second over the best of theirs must be at least `least`."""

    what: str
    ours: str
    theirs: tuple[str, ...]  # formats of llama.cpp
    least: float


RULES = (
    Rule("prefill 512", "float32", ("f32",), 1.0),
    Rule("prefill 2048", "float32", ("f32",), 1.3),
    Rule("prefill 128", "default", LLAMA_FORMATS, 1.8),
    Rule("prefill 512", "default", LLAMA_FORMATS, 2.5),
    Rule("prefill 2048", "default", LLAMA_FORMATS, 3.0),
    Rule("prefill 4096", "default", LLAMA_FORMATS, 4.0),
    # In time: at most 0.75, 0.6 and 0.58 of theirs.
    Rule("decode", "int8", ("q4_0",), 1 / 0.75),
    Rule("decode", "int8", ("q8_0",), 1 / 0.6),
    Rule("decode", "default", ("q4_0",), 1 / 0.58),
)
BATCH = 16
LEAST_BATCH_GAIN = 3.2  # tokens a second of BATCH streams over those of one


class Side:
    """One engine in its own process: JSON lines in, JSON lines out."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        # In a session of its own, so that Ctrl-C reaches this process only, whose end of the pipe is what ends a side.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True
        )
        self._read()

    def measure(self, token_ids: list[int], num_decode: int, num_requests: int = 1) -> dict[str, float]:
        command = {"token_ids": token_ids, "num_decode": num_decode}
        if num_requests > 1:  # ours only
            command["num_requests"] = num_requests
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
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


def has_amx() -> bool:
    try:
        return " amx_tile " in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def make_env(folder: Path) -> Path:
    """A virtual environment with llama-cpp-python, built for this machine. Returns its Python."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        # GCC before 14 drops the writes of llama.cpp's AMX tile configuration as dead: it then dies of SIGILL.
        env = {"CMAKE_ARGS": "-DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'"} if has_amx() else {}
        subprocess.run(
            [python, "-m", "pip", "install", "--no-cache-dir", "--no-binary", "llama-cpp-python", LLAMA_CPP_PYTHON],
            check=True,
            env=os.environ | env,
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


def llama_model(f32: Path, kind: str, llama_python: str) -> Path:
    """The F32 file in another format, by llama.cpp's own quantizer; made once."""
    if kind == "f32":
        return f32
    target = f32.with_name(f32.name.replace(".F32.gguf", f".{kind.upper()}.gguf"))
    if not target.exists():
        print(f"writing {target}", file=sys.stderr)
        partial = target.with_suffix(".partial")
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        subprocess.run(
            [llama_python, str(HERE / "_llama_quantize.py"), str(f32), str(partial), kind], check=True, env=env
        )
        partial.rename(target)
    return target


def start(contestant: Contestant, llama_python: str, model: str, f32: Path, threads: int, n_ctx: int) -> Side:
    env = os.environ | {"OMP_NUM_THREADS": str(threads)}
    if contestant.ours:
        # int8 is made from floats: the default model's own blocks would have to be rounded a second time.
        path = str(f32) if contestant.format == "int8" else model
        options: dict[str, Any] = {"model": path, "threads": threads, "quantization": contestant.format}
        return Side([sys.executable, str(HERE / "_headstart_side.py"), json.dumps(options)], env)
    path = str(llama_model(f32, contestant.format, llama_python))
    options = {"model": path, "threads": threads, "n_ctx": n_ctx, "flash_attn": contestant.flash}
    env = {key: value for key, value in env.items() if key != "PYTHONPATH"}
    return Side([llama_python, str(HERE / "_llama_side.py"), json.dumps(options)], env)


def take_rounds(
    sides: dict[str, Side], lengths: list[int], num_decode: int, rounds: int, vocab_size: int
) -> dict[str, dict[str, list[float]]]:
    """Tokens a second: by side, by `prefill LENGTH`, `decode` and, ours, `decode 16`; one value a round.

    An unmeasured round of the shortest prompt warms up.
    """
    rng = random.Random()
    ours = {each.name for each in CONTESTANTS if each.ours}
    found: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
    for index in range(-1, rounds):
        for length in lengths[:1] if index < 0 else lengths:
            token_ids = [rng.randrange(vocab_size) for _ in range(length)]
            order = list(sides) if index % 2 else list(sides)[::-1]
            for name in order:
                first = length == lengths[0]
                times = sides[name].measure(token_ids, num_decode if first else 0)
                if index < 0:
                    continue
                found[name].setdefault(f"prefill {length}", []).append(length / times["prefill_s"])
                if first:
                    found[name].setdefault("decode", []).append(num_decode / times["decode_s"])
                if first and name in ours:
                    times = sides[name].measure(token_ids, num_decode, BATCH)
                    found[name].setdefault(f"decode {BATCH}", []).append(times["num_decoded"] / times["decode_s"])
    return found


def compare(found: dict[str, dict[str, list[float]]]) -> tuple[list[list[str]], dict[str, Any], list[Bar]]:
    """Table rows (a side each), results and bars."""
    medians = {name: {what: statistics.median(values) for what, values in each.items()} for name, each in found.items()}
    columns = list(next(iter(medians.values())))
    rows = [
        [name, *(f"{each[what]:.0f}" if what in each else "" for what in columns)] for name, each in medians.items()
    ]
    bars: list[Bar] = []
    for rule in RULES:
        rivals = [
            each.name for each in CONTESTANTS if not each.ours and each.format in rule.theirs and each.name in medians
        ]
        if rule.ours not in medians or not rivals or rule.what not in medians[rule.ours]:
            continue
        best = max(rivals, key=lambda name: medians[name][rule.what])
        ratio = medians[rule.ours][rule.what] / medians[best][rule.what]
        bars.append(Bar(f"{rule.what}, {rule.ours} over {best}", ratio, rule.least, at_most=False))
    for name, each in medians.items():
        if f"decode {BATCH}" in each and name != "float32":
            gain = each[f"decode {BATCH}"] / each["decode"]
            bars.append(Bar(f"decode {BATCH} over 1, {name}", gain, LEAST_BATCH_GAIN, at_most=False))
    return rows, {"tokens_per_s": medians, "rounds": found}, bars


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-python", help="Python of an environment that has llama-cpp-python")
    parser.add_argument("--make-env", type=Path, metavar="DIR", help="make that environment there if it is not, use it")
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"alias or GGUF file (default {DEFAULT_MODEL})")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: the cores there are"
    )
    parser.add_argument("--lengths", default="128,512,2048,4096", help="prompt tokens (default 128,512,2048,4096)")
    parser.add_argument("--decode", type=int, default=64, help="tokens to decode after the shortest (default 64)")
    parser.add_argument("--rounds", type=int, default=5, help="default 5; medians count")
    parser.add_argument(
        "--sides", default=",".join(each.name for each in CONTESTANTS), help="default: all, %(default)s"
    )
    parser.add_argument(
        "--work-dir", type=Path, default=Path(tempfile.gettempdir()), help="for llama.cpp's files (1.1 GB)"
    )
    parser.add_argument("--json", type=Path, help="write the numbers there")
    args = parser.parse_args()
    if not args.llama_python and not args.make_env:
        parser.error("give --llama-python PATH or --make-env DIR")
    llama_python = args.llama_python or str(make_env(args.make_env))
    lengths = sorted(int(text) for text in args.lengths.split(","))
    f32 = f32_model(args.model, args.work_dir)
    vocab_size = read_model_spec(resolve(args.model, progress=None)).vocab_size
    n_ctx = max(lengths) + args.decode + 64
    chosen = [each for each in CONTESTANTS if each.name in args.sides.split(",")]
    with ExitStack() as stack:
        sides = {
            each.name: stack.enter_context(start(each, llama_python, args.model, f32, args.threads, n_ctx))
            for each in chosen
        }
        found = take_rounds(sides, lengths, args.decode, args.rounds, vocab_size)
    rows, results, bars = compare(found)
    columns = list(next(iter(found.values())))
    show(f"Tokens/s, {args.threads} threads, median of {args.rounds}", ("", *columns), rows, bars)
    return finish(args.json, results, bars)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
