"""From requests to rendered prompts, for commands that read many: what was tokenized before is not tokenized again.

Gets the template and the tokenizer as functions; a template that refuses a request is replaced by a plain form.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

from headstart.prompt.rendered import Prompt, Span, locate, token_ids
from headstart.prompt.request import PROMPT_ROLE, PromptRequest, as_json, content_of

MAX_CACHED_CHARACTERS = 1 << 25


class Template(Protocol):
    """Renders a request. `RequestError` for one that the model's template refuses."""

    def __call__(self, request: PromptRequest) -> str: ...


class PromptMaker:
    """Makes prompts. `encode`: text to token ids, exact where a text begins with one of `borders` (control tokens)."""

    def __init__(self, template: Template, encode: Callable[[str], Sequence[int]], borders: Sequence[str]) -> None:
        self._template = template
        self._encode = encode
        self._borders = tuple(borders)
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._num_characters = 0

    def make(self, request: PromptRequest) -> Prompt:
        """Raises `RequestError`."""
        if request.messages[0].get("role") == PROMPT_ROLE:
            text = content_of(request.messages[0])
        else:
            text = self._template(request)
        spans = locate(request.messages, text)
        return Prompt(request, text, self._tokens(text, spans), spans)

    def count(self, text: str) -> int:
        """Tokens of a text on its own."""
        return len(self._piece(text))

    def _tokens(self, text: str, spans: Sequence[Span]) -> array[int]:
        ids = array("I")
        if type(text) is not str:  # it says itself how it is cut
            ids.extend(self._encode(text))
            return ids
        start = 0
        for cut in [*self._cuts(text, spans), len(text)]:
            ids.extend(self._piece(text[start:cut]))
            start = cut
        return ids

    def _cuts(self, text: str, spans: Sequence[Span]) -> list[int]:
        """Between any two messages, where the template's first control token stands: no token reaches over it."""
        cuts = []
        for first, second in pairwise(spans):
            between = text[first.end : second.start]
            places = [place for border in self._borders if (place := between.find(border)) >= 0]
            if places and first.end + min(places) > 0:
                cuts.append(first.end + min(places))
        return cuts

    def _piece(self, text: str) -> array[int]:
        ids = self._known.get(text)
        if ids is not None:
            self._known.move_to_end(text)
            return ids
        ids = self._known[text] = token_ids(self._encode(text))
        self._num_characters += len(text)
        while self._num_characters > MAX_CACHED_CHARACTERS and len(self._known) > 1:
            oldest, _ = self._known.popitem(last=False)
            self._num_characters -= len(oldest)
        return ids


def plain_text(request: PromptRequest) -> str:
    """A prompt in no model's form, for requests that the model's template refuses: tools as JSON, then the messages."""
    tools = f"tools\n{as_json(list(request.tools))}\n" if request.tools else ""
    return tools + "".join(f"{message.get('role')}\n{content_of(message)}\n" for message in request.messages)
