"""The shapes of the requests that clients send, and their decoding. Types only; ranges are checked in `params`.

Every field may be null, which means absent. Fields that are not named here are accepted and ignored, as clients of
OpenAI-compatible servers send many of their own.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, TypeVar

import msgspec

from headstart.server.errors import ApiError, bad_field, bad_json


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """What chat and plain completions share."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    slo_ttft_ms: float | None = None
    # Would change the answer and are not honoured: refused when set (see `params.refuse_unsupported`).
    best_of: int | None = None
    min_tokens: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    grammar: Any = None
    use_beam_search: bool | None = None


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: list[str] | None = None
    web_search_options: Any = None


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    prompt: Any = None  # str | list[str] | list[int] | list[list[int]]: told apart in `completions`
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    prompt_embeds: Any = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[int] | None = None
    skip_special_tokens: bool | None = None


RequestT = TypeVar("RequestT", bound=msgspec.Struct)
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$")


def decode(body: bytes | bytearray, kind: type[RequestT]) -> RequestT:
    """Parse one request. Raises `ApiError` 400 that names the field at fault, or says where the JSON is broken."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_finite(body) or bad_json(str(error)) from None
    except RecursionError:
        raise bad_json("it is nested too deeply") from None


def _field_error(message: str) -> ApiError:
    found = _PATH.search(message)
    path = found.group(1) if found else ""
    what = message[: found.start()] if found else message
    what = what.replace(" | null", "").replace("`", "'")
    if not path:
        return ApiError(400, f"the body must be a JSON object: {what}")
    return bad_field(path.removesuffix("[...]"), f"has the wrong type: {what[:1].lower()}{what[1:]}")


def _not_finite(body: bytes | bytearray) -> ApiError | None:
    """NaN and Infinity are not JSON, but Python's `json.dumps` writes them: name the field rather than the byte."""
    try:
        fields = json.loads(bytes(body))
    except (ValueError, RecursionError):
        return None
    if isinstance(fields, dict):
        for name, value in fields.items():
            if isinstance(value, float) and not math.isfinite(value):
                return bad_field(str(name), "must be a finite number")
    return None
