"""A template and a tokenizer small enough to reason about: ChatML with tools and parameters in front; words as tokens."""

from __future__ import annotations

import re

from headstart.prompt.render import PromptMaker
from headstart.prompt.request import PromptRequest, as_json, content_of


def template(request: PromptRequest) -> str:
    head = "".join(f"{as_json(tool)}\n" for tool in request.tools)
    head += as_json(request.parameters) + "\n" if request.parameters else ""
    body = "".join(f"<|start|>{m['role']}\n{content_of(m).strip()}<|end|>\n" for m in request.messages)
    return f"{head}{body}<|start|>assistant\n"


class Words:
    """An id for each word and each other character, by first appearance."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self.num_encoded = 0  # characters

    def encode(self, text: str) -> list[int]:
        self.num_encoded += len(text)
        parts = re.findall(r"<\|\w+\|>|\w{1,6}|\W", text)
        return [self._ids.setdefault(part, len(self._ids)) for part in parts]


def prompt_maker(words: Words | None = None) -> PromptMaker:
    return PromptMaker(template, (words or Words()).encode, ("<|end|>", "<|start|>"))
