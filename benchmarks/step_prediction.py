"""How well are step times predicted? On Poisson traffic of mixed lengths, after a calibration: errors against two bars.

Calibrates (`headstart calibrate`), starts a server of its own that logs its steps, finds by a burst how many requests a
second it can answer, then sends Poisson arrivals at a part of that. Each step's time was predicted when it began; the
error is predicted over real, less 1. The machine should do nothing else; client and server share its cores already.

    python benchmarks/step_prediction.py
    python benchmarks/step_prediction.py --no-calibrate --seconds 60
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from _verdict import Bar, finish, run_main, show

from headstart.bench import BenchOptions, Report, run
from headstart.bench.options import BenchError, LengthDist
from headstart.cli.local_server import LocalServer
from headstart.config import DEFAULT_MODEL
from headstart.core.cost import StepWork
from headstart.engine.step_log import StepRecord, read_step_log
from headstart.perf.calibration import kind_of, prediction_errors

MEDIAN_BAR, P90_BAR = 0.06, 0.15
BURST = 24  # requests at once: enough that the server is never idle before the last few


def error(step: StepRecord) -> float:
    return step.predicted_seconds / step.seconds - 1


def calibrate(model: str, seconds: int) -> None:
    command = [sys.executable, "-m", "headstart", "calibrate", model, "--seconds", str(seconds)]
    if subprocess.run(command, check=False).returncode != 0:
        raise BenchError("headstart calibrate failed; see its lines above")


def traffic(url: str, api_key: str, args: argparse.Namespace, *, requests: int, rate: float, seed: int) -> Report:
    report = run(
        BenchOptions(
            url=url,
            api_key=api_key,
            workload="poisson",
            requests=requests,
            rate=rate,
            seed=seed,
            prompt_tokens=args.prompt_tokens,
            output_tokens=args.output_tokens,
        )
    )
    if report.interrupted:
        raise KeyboardInterrupt
    if report.num_errors:
        raise BenchError(f"{report.num_errors} of {len(report.records)} requests failed")
    return report


def rows_of(steps: Sequence[StepRecord]) -> tuple[list[list[str]], dict[str, Any]]:
    """Errors of all steps and by kind, for the eye and for the file."""
    groups: dict[str, list[StepRecord]] = {}
    for step in steps:
        groups.setdefault(kind_of(StepWork(**step.work)), []).append(step)
    rows, results = [], {}
    for kind, some in [*sorted(groups.items()), ("all", list(steps))]:
        found = prediction_errors([error(step) for step in some])
        results[kind] = _plain(found)
        rows.append([kind, str(found.count), f"{found.bias:+.1%}", f"{found.median:.1%}", f"{found.p90:.1%}"])
    return rows, results


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"to serve (default {DEFAULT_MODEL})")
    parser.add_argument("--kv-cache-memory", metavar="SIZE", help="of the server, such as 2GB (default: the server's)")
    parser.add_argument("--calibrate", action=argparse.BooleanOptionalAction, default=True, help="first (default)")
    parser.add_argument("--calibrate-seconds", type=int, default=60, help="how long (default 60)")
    parser.add_argument("--load", type=float, default=0.7, help="part of what the server can answer (default 0.7)")
    parser.add_argument("--seconds", type=float, default=90.0, help="of Poisson traffic (default 90)")
    parser.add_argument("--prompt-tokens", type=LengthDist.parse, default=LengthDist(16, 1024), help="16-1024")
    parser.add_argument("--output-tokens", type=LengthDist.parse, default=LengthDist(4, 96), help="4-96")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and lengths (default 0)")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    if args.calibrate:
        calibrate(args.model, args.calibrate_seconds)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "steps.jsonl"
        arguments = ["--step-log", str(log)]
        arguments += ["--kv-cache-memory", args.kv_cache_memory] if args.kv_cache_memory else []
        with LocalServer(args.model, arguments) as server:
            url, key = server.client.base_url, server.api_key
            began = time.monotonic()
            traffic(url, key, args, requests=BURST, rate=1000.0, seed=args.seed + 1)
            capacity = BURST / (time.monotonic() - began)
            rate = args.load * capacity
            print(f"{capacity:.2f} requests a second at most; {rate:.2f} arrive", file=sys.stderr, flush=True)
            began_at = time.time()
            count = max(1, round(args.seconds * rate))
            traffic(url, key, args, requests=count, rate=rate, seed=args.seed)
        steps = [step for step in read_step_log(log) if step.at - step.seconds >= began_at]
    if not steps:
        raise BenchError("no step was logged")
    rows, results = rows_of(steps)
    bars = [
        Bar("median error of predicted step times", results["all"]["median"], MEDIAN_BAR, at_most=True),
        Bar("90th percentile", results["all"]["p90"], P90_BAR, at_most=True),
    ]
    show(
        f"Predicted over real step time, {count} requests at {args.load:g} of capacity",
        ("steps", "count", "bias", "median error", "90th percentile"),
        rows,
        bars,
    )
    return finish(args.json, {"errors": results, "rate": rate, "steps": [_plain(step) for step in steps]}, bars)


def _plain(found: msgspec.Struct) -> dict[str, Any]:
    return msgspec.structs.asdict(found)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
