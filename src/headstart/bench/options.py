"""What a benchmark run is asked to do: one frozen dataclass, checked here. Knows neither HTTP nor the command line."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

WorkloadName = Literal["idle", "prefix", "hol", "poisson", "chat", "trace"]
ApiName = Literal["chat", "completions"]


class BenchError(ValueError):
    """The benchmark cannot run as asked. The message says what is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class LengthDist:
    """A distribution of lengths in tokens: always `low`, uniform or log-uniform (`log`: as many from 32 to 64 as from
    2,048 to 4,096) from `low` to `high`, or lognormal with a median."""

    low: int
    high: int
    median: float | None = None
    sigma: float = 0.0
    log: bool = False

    def draw(self, rng: random.Random) -> int:
        if self.median is not None:
            return max(1, round(rng.lognormvariate(math.log(self.median), self.sigma)))
        if self.log:
            return round(math.exp(rng.uniform(math.log(self.low), math.log(self.high))))
        return rng.randint(self.low, self.high)

    @classmethod
    def parse(cls, text: str) -> LengthDist:
        """`256`, `64-512`, `log:64-512` or `lognormal:MEDIAN:SIGMA`. Raises `BenchError` for anything else."""
        try:
            if text.startswith("lognormal:"):
                median, sigma = (float(part) for part in text.removeprefix("lognormal:").split(":"))
                if not (1 <= median <= 10_000_000 and 0 <= sigma <= 5):
                    raise ValueError
                return cls(1, 1, median, sigma)
            low, _, high = text.removeprefix("log:").partition("-")
            bounds = int(low), int(high or low)
            if not 1 <= bounds[0] <= bounds[1]:
                raise ValueError
            return cls(*bounds, log=text.startswith("log:"))
        except ValueError:
            raise BenchError(
                f"{text!r} is no length; write a number (256), a range (64-512, log:64-512) or lognormal:MEDIAN:SIGMA"
            ) from None


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Everything that `run` needs. Lengths in tokens, times in seconds unless the name ends in `_ms`."""

    workload: WorkloadName = "idle"
    url: str = "http://127.0.0.1:8000"
    against: str | None = None  # a second server, measured in turn with the first
    model: str | None = None  # default: the first of /v1/models
    against_model: str | None = None
    api: ApiName = "chat"
    api_key: str | None = None
    rounds: int = 1  # the whole workload, this many times; medians are shown
    seed: int = 0  # schedule and lengths; the prompts' words are fresh in every run
    requests: int | None = None  # idle: of each length; prefix: pairs; hol: short prompts; poisson: all
    lengths: tuple[int, ...] = (128, 512, 2048)  # idle: prompt lengths
    rate: float = 1.0  # poisson: requests a second; chat: conversations a second
    prompt_tokens: LengthDist = LengthDist(32, 256)  # poisson
    output_tokens: LengthDist | None = None  # every workload but trace; default: 16, chat 64
    prefix_tokens: int = 1024  # prefix: the shared system prompt
    suffix_tokens: int = 64  # prefix: what differs
    short_tokens: int = 64  # hol
    long_tokens: int = 6000  # hol
    streams: int = 1  # hol: chats that run meanwhile
    stream_tokens: int = 1024  # hol: a chat's length; a chat that ends is followed by another
    short_interval: float = 1.0  # hol: seconds between short prompts
    file: Path | None = None  # chat: questions; trace: the trace
    shrink: float = 1.0  # trace: divides every length
    speed: float = 1.0  # trace: multiplies the rate
    limit: int | None = None  # trace: rows; chat: conversations
    max_prompt_tokens: int | None = None  # trace: longer rows (after --shrink) are left out, and counted
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    ignore_eos: bool = True  # not chat: answers have exactly the asked length
    check_ledger: bool = False  # compare the server's ledger with the client's clock
    timeout: float = 600.0  # seconds a request
    connect_timeout: float = 10.0  # seconds
    max_in_flight: int = 4096  # requests beyond this are not sent, and counted as errors


DEFAULT_REQUESTS: dict[str, int] = {"idle": 5, "prefix": 5, "hol": 10, "poisson": 60}
DEFAULT_OUTPUT_TOKENS: dict[str, LengthDist] = {"chat": LengthDist(64, 64)}
DEFAULT_CONVERSATIONS = 10

_POSITIVE = ("rate", "shrink", "speed", "timeout", "connect_timeout", "short_interval", "slo_ttft_ms", "slo_tpot_ms")
_AT_LEAST_ONE = (
    "rounds",
    "requests",
    "prefix_tokens",
    "suffix_tokens",
    "short_tokens",
    "long_tokens",
    "streams",
    "stream_tokens",
    "limit",
    "max_prompt_tokens",
    "max_in_flight",
)


def validate(options: BenchOptions) -> BenchOptions:
    """Check every field. Raises `BenchError` that names the option; returns `options` unchanged."""
    for item in fields(options):
        value = getattr(options, item.name)
        flag = "--" + item.name.removesuffix("_ms").replace("_", "-")
        if value is None:
            continue
        if item.name in _POSITIVE and not 0 < value < math.inf:
            raise BenchError(f"{flag} is {value}; it must be above 0")
        if item.name in _AT_LEAST_ONE and value < 1:
            raise BenchError(f"{flag} is {value}; it must be at least 1")
    if options.workload not in get_args(WorkloadName):
        raise BenchError(f"--workload is {options.workload!r}; it must be one of {', '.join(get_args(WorkloadName))}")
    if options.api not in get_args(ApiName):
        raise BenchError(f"--api is {options.api!r}; it must be one of {', '.join(get_args(ApiName))}")
    if options.api_key and not (options.api_key.isascii() and options.api_key.isprintable()):
        raise BenchError("--api-key has characters that no HTTP header can carry")
    if not options.lengths or min(options.lengths) < 1:
        raise BenchError("--lengths must hold numbers of at least 1, as in --lengths 128,512,2048")
    if options.workload == "trace" and options.file is None:
        raise BenchError("--workload trace needs --file: a Mooncake .jsonl or an Azure .csv trace")
    if options.workload == "chat" and options.api != "chat":
        raise BenchError("--workload chat works through --api chat only")
    return options
