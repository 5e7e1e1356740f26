"""`/v1/chat/completions`: its request and its answers. Everything between is `generation`'s."""

from __future__ import annotations

from typing import Any

from headstart.server import params
from headstart.server.choice import Delta
from headstart.server.errors import bad_field
from headstart.server.formats import ChunkEncoder, Head, Whole
from headstart.server.logprobs import chat_logprobs
from headstart.server.messages import ChatPrompts
from headstart.server.params import Generation, Limits
from headstart.server.protocol import ChatRequest, decode
from headstart.server.sse import ChunkFrame, encode


class ChatApi:
    route = "/v1/chat/completions"
    id_prefix = "chatcmpl-"
    prompt_field = "messages"

    def __init__(self, prompts: ChatPrompts) -> None:
        self._prompts = prompts

    def parse(self, body: bytearray, limits: Limits) -> tuple[str | None, Generation]:
        fields = decode(body, ChatRequest)
        params.refuse_unsupported(fields)
        logprobs = _num_logprobs(fields, limits)
        sampling = params.sampling_params(
            fields, limits, max_tokens=_max_tokens(fields, limits), logprobs=logprobs, prompt_logprobs=None
        )
        tools = fields.tools if fields.tool_choice != "none" else None
        prompt = self._prompts.render(
            fields.messages,
            tools=tools,
            add_generation_prompt=fields.add_generation_prompt is not False,
            extra=fields.chat_template_kwargs or {},
        )
        asked = params.generation(
            fields,
            limits,
            prompts=(prompt,),
            sampling=sampling,
            add_special_tokens=bool(fields.add_special_tokens),  # the template writes its own
            chat={
                "messages": fields.messages,
                "tools": tools,
                "chat_template_kwargs": fields.chat_template_kwargs,
                "cache_salt": fields.cache_salt,
            },
        )
        return fields.model, asked

    def encoder(self, head: Head, asked: Generation) -> ChunkEncoder:
        return ChatChunks(head, asked)

    def choice(self, whole: Whole, asked: Generation) -> dict[str, Any]:
        return {
            "index": whole.index,
            "message": {"role": "assistant", "content": whole.text, "refusal": None},
            "logprobs": None if asked.sampling.logprobs is None else chat_logprobs(whole.entries),
            "finish_reason": whole.finish_reason,
            "stop_reason": whole.stop_reason,
        }

    def object(self) -> str:
        return "chat.completion"


class ChatChunks:
    """Encodes the chunks of one stream. A chunk of text alone costs one encoded string and one join."""

    def __init__(self, head: Head, asked: Generation) -> None:
        self._frame = ChunkFrame(head.fields("chat.completion.chunk"), {"usage": None} if asked.include_usage else {})
        self._with_logprobs = asked.sampling.logprobs is not None
        self._plain_end = b'},"logprobs":null,"finish_reason":null}' + self._frame.closing
        self._openings = [self._frame.opening + b'{"index":%d,"delta":{"content":' % index for index in range(asked.n)]

    def chunk(self, delta: Delta) -> bytes:
        if not delta.first and not self._with_logprobs and delta.finish_reason is None:
            return b"".join((self._openings[delta.index], encode(delta.text), self._plain_end))
        content: dict[str, Any] = {"role": "assistant"} if delta.first else {}
        if delta.text or delta.first:
            content["content"] = delta.text
        choice = {
            "index": delta.index,
            "delta": content,
            "logprobs": chat_logprobs(delta.entries) if self._with_logprobs else None,
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        return b"".join((self._frame.opening, encode(choice), self._frame.closing))

    def usage(self, usage: dict[str, Any]) -> bytes:
        return self._frame.usage(usage)


def _max_tokens(fields: ChatRequest, limits: Limits) -> int:
    default = limits.default_max_tokens or limits.max_model_len
    if fields.max_completion_tokens is not None:
        return params.max_tokens("max_completion_tokens", fields.max_completion_tokens, default)
    return params.max_tokens("max_tokens", fields.max_tokens, default)


def _num_logprobs(fields: ChatRequest, limits: Limits) -> int | None:
    if fields.top_logprobs is not None and not fields.logprobs:
        raise bad_field("top_logprobs", "is only allowed with logprobs=true")
    if not fields.logprobs:
        return None
    return params.num_logprobs("top_logprobs", fields.top_logprobs or 0, limits)
