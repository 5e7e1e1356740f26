"""From a request's fields to settled `SamplingParams`: defaults, ranges, and the fields that cannot be honoured.

Every refusal is a 400 that names the field. Nothing here reads a clock or a model; the only randomness is the seed of a
request that brings none.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headstart.config import ServerConfig
from headstart.core.request import SamplingParams
from headstart.hub.generation_config import SamplingDefaults
from headstart.server.errors import ApiError, bad_field
from headstart.server.promise import SLO_FIELD, slo_seconds
from headstart.server.protocol import ChatRequest, CompletionRequest, SamplingFields

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1_000
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1_024
MAX_CACHE_SALT = 256
SEED_LOW, SEED_HIGH = -(1 << 63), (1 << 64) - 1
_SEED_MASK = (1 << 63) - 1
_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a request: the server's settings and the model's numbers."""

    vocab_size: int
    max_model_len: int
    max_n: int
    max_logprobs: int
    max_priority: int
    default_max_tokens: int | None
    eos_token_ids: tuple[int, ...]
    # For sampling fields that the request leaves out.
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)

    @classmethod
    def of(cls, server: ServerConfig, *, vocab_size: int, max_model_len: int, eos: tuple[int, ...]) -> Limits:
        return cls(
            vocab_size,
            max_model_len,
            server.max_n,
            server.max_logprobs,
            server.max_priority,
            server.default_max_tokens,
            eos,
        )


@dataclass(frozen=True, slots=True)
class Generation:
    """What one HTTP request asks for, whichever API it came by.

    `prompts` are texts still to be tokenized, or ids. `sampling.max_tokens` is what the caller asked for; the room that
    the context leaves is known only after tokenization.
    """

    prompts: tuple[str | tuple[int, ...], ...]
    sampling: SamplingParams
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    echo: bool = False
    priority: int = 0
    cache_salt: str = ""
    slo_ttft: float | None = None  # seconds
    chat: Mapping[str, Any] | None = None  # the fields that a chat's prompt was made from


def sampling_params(
    fields: SamplingFields, limits: Limits, *, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """Check and settle what decides the next token. Raises `ApiError` 400."""
    defaults = limits.defaults
    top_p = _number("top_p", fields.top_p, defaults.top_p, 0.0, 1.0)
    top_k = _top_k(defaults.top_k if fields.top_k is None else fields.top_k, limits.vocab_size)
    if top_p == 0.0:  # OpenAI's range includes 0: only the most likely token
        top_p, top_k = 1.0, 1
    repetition = _number("repetition_penalty", fields.repetition_penalty, defaults.repetition_penalty, 0.0, 10.0)
    if repetition == 0.0:
        raise bad_field("repetition_penalty", "must be greater than 0")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_number("temperature", fields.temperature, defaults.temperature, 0.0, 2.0),
        top_k=top_k,
        top_p=top_p,
        min_p=_number("min_p", fields.min_p, defaults.min_p, 0.0, 1.0),
        repetition_penalty=repetition,
        presence_penalty=_number("presence_penalty", fields.presence_penalty, 0.0, -2.0, 2.0),
        frequency_penalty=_number("frequency_penalty", fields.frequency_penalty, 0.0, -2.0, 2.0),
        logit_bias=_logit_bias(fields.logit_bias, limits.vocab_size),
        seed=_seed(fields.seed),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop_token_ids=_stop_token_ids(fields, limits),
    )


def generation(
    fields: SamplingFields,
    limits: Limits,
    *,
    prompts: tuple[str | tuple[int, ...], ...],
    sampling: SamplingParams,
    add_special_tokens: bool,
    echo: bool = False,
    chat: Mapping[str, Any] | None = None,
) -> Generation:
    """What the APIs ask for in the same words, beside what each has read itself. Raises `ApiError` 400."""
    stream, include_usage = _streaming(fields)
    return Generation(
        prompts=prompts,
        sampling=sampling,
        n=choices(fields, limits),
        stream=stream,
        include_usage=include_usage,
        stop=_stop_strings(fields.stop),
        include_stop=bool(fields.include_stop_str_in_output),
        skip_special_tokens=fields.skip_special_tokens is not False,
        add_special_tokens=add_special_tokens,
        echo=echo,
        priority=_priority(fields, limits),
        cache_salt=_cache_salt(fields),
        slo_ttft=None if fields.slo_ttft_ms is None else slo_seconds(SLO_FIELD, fields.slo_ttft_ms),
        chat=chat,
    )


def nth_seed(seed: int, index: int) -> int:
    """The seed of choice `index`: the first one equals a request with n=1, the others have nothing to do with it, nor
    with the choices of a request whose seed is the next one."""
    return seed if index == 0 else _mixed(_mixed(seed) + index) & _SEED_MASK


def _mixed(value: int) -> int:
    """A bijection of 64 bits that spreads neighbours apart (the finalizer of SplitMix64, Steele et al. 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def choices(fields: SamplingFields, limits: Limits) -> int:
    n = fields.n if fields.n is not None else 1
    return _integer("n", n, 1, limits.max_n)


def _streaming(fields: SamplingFields) -> tuple[bool, bool]:
    """(stream, include_usage)."""
    stream = bool(fields.stream)
    if fields.stream_options is not None and not stream:
        raise bad_field("stream_options", "is only allowed with stream=true")
    return stream, bool(fields.stream_options and fields.stream_options.include_usage)


def max_tokens(name: str, value: int | None, default: int, *, lowest: int = 1) -> int:
    return default if value is None else _integer(name, value, lowest, (1 << 62))


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if len(strings) > MAX_STOP_STRINGS:
        raise bad_field("stop", f"has {len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed")
    for text in strings:
        if not text:
            raise bad_field("stop", "must not hold an empty string")
        if len(text) > MAX_STOP_CHARS:
            raise bad_field("stop", f"holds a string of {len(text)} characters; at most {MAX_STOP_CHARS} are allowed")
    return tuple(dict.fromkeys(strings))


def _priority(fields: SamplingFields, limits: Limits) -> int:
    return _integer("priority", fields.priority or 0, -limits.max_priority, limits.max_priority)


def _cache_salt(fields: SamplingFields) -> str:
    salt = fields.cache_salt or ""
    if len(salt) > MAX_CACHE_SALT:
        raise bad_field("cache_salt", f"has {len(salt)} characters; at most {MAX_CACHE_SALT} are allowed")
    return salt


def num_logprobs(name: str, value: int, limits: Limits) -> int:
    return _integer(name, value, 0, min(limits.max_logprobs, limits.vocab_size))


def check_token_ids(name: str, ids: list[int], vocab_size: int) -> tuple[int, ...]:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        at, bad = next((at, token) for at, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise bad_field(name, f"holds the token id {bad} at position {at}; ids go from 0 to {vocab_size - 1}")
    return tuple(ids)


def refuse_unsupported(fields: SamplingFields) -> None:
    """400 for what would change the answer and cannot be honoured: silence would be a wrong answer."""
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise bad_field("best_of", "is not supported; leave it out or make it equal to n", "unsupported_parameter")
    if fields.min_tokens:
        raise _unsupported("min_tokens")
    if fields.response_format is not None and fields.response_format.get("type") != "text":
        raise bad_field("response_format", "other than {'type': 'text'} is not supported", "unsupported_parameter")
    for name in ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "grammar"):
        if getattr(fields, name) is not None:
            raise _unsupported(name)
    if fields.use_beam_search:
        raise _unsupported("use_beam_search")
    if isinstance(fields, ChatRequest):
        _refuse_in_chat(fields)
    if isinstance(fields, CompletionRequest):
        if fields.suffix:
            raise _unsupported("suffix")
        if fields.prompt_embeds is not None:
            raise _unsupported("prompt_embeds")


def _refuse_in_chat(fields: ChatRequest) -> None:
    for name in ("functions", "function_call", "audio", "web_search_options"):
        if getattr(fields, name) is not None:
            raise _unsupported(name)
    if fields.modalities is not None and fields.modalities != ["text"]:
        raise bad_field("modalities", "other than ['text'] are not supported", "unsupported_parameter")
    if fields.tool_choice is not None and fields.tool_choice not in ("auto", "none"):
        raise bad_field("tool_choice", "must be 'auto' or 'none'; calls cannot be forced", "unsupported_parameter")


def _unsupported(name: str) -> ApiError:
    return bad_field(name, "is not supported by this server; leave it out", "unsupported_parameter")


def _number(name: str, value: float | None, default: float, low: float, high: float) -> float:
    if value is None:
        return default
    if not math.isfinite(value) or not low <= value <= high:
        raise bad_field(name, f"is {value:g}; it must be from {low:g} to {high:g}")
    return value


def _integer(name: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        shown = str(value) if abs(value) < 1 << 70 else "out of range"
        raise bad_field(name, f"is {shown}; it must be from {low} to {high}")
    return value


def _top_k(value: int, vocab_size: int) -> int:
    if value == -1:  # -1 is vLLM's "off"
        return 0
    if value < 0:
        raise bad_field("top_k", f"is {value}; it must be 0 (off) or more")
    return 0 if value >= vocab_size else value


def _seed(value: int | None) -> int:
    if value is None:
        return secrets.randbits(63)
    return _integer("seed", value, SEED_LOW, SEED_HIGH) & _SEED_MASK


def _logit_bias(bias: dict[int, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if not bias:
        return ()
    if len(bias) > MAX_LOGIT_BIAS:
        raise bad_field("logit_bias", f"has {len(bias)} entries; at most {MAX_LOGIT_BIAS} are allowed")
    check_token_ids("logit_bias", list(bias), vocab_size)
    for token, value in bias.items():
        if not -100 <= value <= 100:
            raise bad_field("logit_bias", f"of token {token} is {value:g}; it must be from -100 to 100")
    return tuple(bias.items())


def _stop_token_ids(fields: SamplingFields, limits: Limits) -> tuple[int, ...]:
    given = fields.stop_token_ids or []
    if len(given) > MAX_STOP_TOKEN_IDS:
        raise bad_field("stop_token_ids", f"has {len(given)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed")
    check_token_ids("stop_token_ids", given, limits.vocab_size)
    eos = () if fields.ignore_eos else limits.eos_token_ids
    return tuple(dict.fromkeys((*given, *eos)))
