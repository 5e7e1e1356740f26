"""What the first request would pay for, done before it: threads, the first use of template, tokenizer and encoders."""

from __future__ import annotations

import contextlib

import msgspec

from headstart.core.step import RequestOutput
from headstart.server.choice import Delta
from headstart.server.errors import ApiError
from headstart.server.formats import Api, Head
from headstart.server.services import Services
from headstart.text import Detokenizer

_TEXT = "Hello, world! What is 12 + 34?\n" * 16
_BODY = msgspec.json.encode({"prompt": _TEXT, "messages": [{"role": "user", "content": _TEXT}], "stream": True})


def warm_up(services: Services, apis: tuple[Api, ...]) -> None:
    """In this thread and in the pool's. Blocks for some milliseconds; the engine need not be there yet."""

    def once() -> None:
        for api in apis:
            with contextlib.suppress(ApiError):  # a model without a chat template
                _rehearse(services, api)

    services.pool.warm_up(once)
    once()


def _rehearse(services: Services, api: Api) -> None:
    """A request as it would go, without an engine between."""
    _, asked = api.parse(bytearray(_BODY), services.limits_of(services.tokenizer.vocab_size, len(_TEXT)))
    (prompt,) = asked.prompts
    assert isinstance(prompt, str)
    ids = services.tokenizer.encode(prompt, asked.add_special_tokens)
    detokenizer = Detokenizer(services.tokenizer, ids, ("a stop string",))
    text = detokenizer.push(ids) + detokenizer.finish()
    encoder = api.encoder(Head("", 0, services.model_name, ""), asked)
    for first in (True, False):
        encoder.chunk(Delta(0, first, text, (), None, None, RequestOutput("")))
