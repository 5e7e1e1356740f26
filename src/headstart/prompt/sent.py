"""Prompts that a server computed lately: what a new one is compared with, to say why it missed the prefix cache.

Owns what is remembered of whom, and what is forgotten first. Bodies are kept as they were decoded and read only when
somebody asks, so that remembering costs nothing. Nothing is shared between tenants. Written to by one thread; a list of
`candidates` may be searched in another.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from headstart.prompt.chat import ChatPrompt, Part, read_request
from headstart.prompt.divergence import common_prefix_length

MAX_PROMPTS = 128  # a tenant
MAX_TIES = 8
_ID_BYTES = 36  # of a token id in a tuple
_ENTRY_BYTES = 500
_ANSWER_ROLE = "assistant"


class Answer(NamedTuple):
    ids: Sequence[int]
    text: str


@dataclass(slots=True, eq=False)
class Sent:
    """A prompt. `body`: a chat request's fields that decide it (see `chat.read_request`); None: it came as ids.

    `num_bytes` that it takes. `remembered`: whether it can still be found.
    """

    ids: Sequence[int]
    salt: str
    body: Mapping[str, Any] | None
    num_bytes: int = 0
    answers: list[Answer] = field(default_factory=list)
    remembered: bool = False

    def read(self, answer: Answer | None = None) -> ChatPrompt | None:
        """With the answer as one more message. Raises `PromptError`."""
        if self.body is None:
            return None
        prompt = read_request(self.body)
        if answer is None:
            return prompt
        messages = sum(not part.is_tool for part in prompt.parts)
        return replace(prompt, parts=(*prompt.parts, Part(_ANSWER_ROLE, messages, answer.text)))


@dataclass(frozen=True, slots=True)
class Near:
    """An earlier prompt and how many first tokens a new one shares with it and the answer to it.

    `num_held`: how many of them have keys and values; an answer's last token has none.
    """

    sent: Sent
    answer: Answer | None
    num_shared: int

    @property
    def num_held(self) -> int:
        held = len(self.sent.ids) + (0 if self.answer is None else max(0, len(self.answer.ids) - 1))
        return min(self.num_shared, held)

    @property
    def num_known(self) -> int:
        """Tokens of the prompt and the answer."""
        return len(self.sent.ids) + (0 if self.answer is None else len(self.answer.ids))


class SentPrompts:
    """The latest prompts of all tenants, in `max_bytes`; the oldest goes first. 0: none is remembered."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._order: OrderedDict[Sent, str] = OrderedDict()  # with the tenant, the oldest first
        self._of_tenant: dict[str, deque[Sent]] = {}
        self.num_bytes = 0

    def add(self, tenant: str, sent: Sent, body_bytes: int) -> None:
        """Its keys and values are there. `body_bytes`: what its body takes."""
        weight = _ENTRY_BYTES + _ID_BYTES * len(sent.ids) + 2 * body_bytes
        if weight > self._max_bytes:
            return
        sent.num_bytes, sent.remembered = weight, True
        self.num_bytes += weight
        self._order[sent] = tenant
        mine = self._of_tenant.setdefault(tenant, deque())
        mine.append(sent)
        if len(mine) > MAX_PROMPTS:
            self._forget(mine[0])
        self._make_room()

    def answered(self, sent: Sent, ids: Sequence[int], text: str) -> None:
        if not sent.remembered or not ids:
            return
        sent.answers.append(Answer(ids, text))
        weight = _ID_BYTES * len(ids) + len(text)
        sent.num_bytes += weight
        self.num_bytes += weight
        self._make_room()

    def candidates(self, tenant: str) -> list[Sent]:
        """The latest first."""
        return list(reversed(self._of_tenant.get(tenant, ())))

    def _make_room(self) -> None:
        while self.num_bytes > self._max_bytes:
            self._forget(next(iter(self._order)))

    def _forget(self, sent: Sent) -> None:
        """It is the oldest of its tenant."""
        tenant = self._order.pop(sent)
        mine = self._of_tenant[tenant]
        mine.popleft()
        if not mine:
            del self._of_tenant[tenant]
        sent.remembered = False
        self.num_bytes -= sent.num_bytes


def nearest(candidates: Sequence[Sent], salt: str, ids: Sequence[int], block_size: int) -> list[Near]:
    """Those that share most whole blocks with the beginning of `ids` under `salt`, the latest first."""
    found: list[Near] = []
    most = -1
    for sent in candidates:
        if sent.salt != salt or not _may_share(sent.ids, ids, most * block_size):
            continue
        near = _near(sent, ids)
        blocks = near.num_shared // block_size
        if blocks > most:
            found, most = [], blocks
        if blocks == most and len(found) < MAX_TIES:
            found.append(near)
    return found


def shared_elsewhere(candidates: Sequence[Sent], salt: str, ids: Sequence[int]) -> int:
    """The most first tokens that any of another salt shares."""
    return max((_near(sent, ids).num_shared for sent in candidates if sent.salt != salt), default=0)


def _may_share(old: Sequence[int], new: Sequence[int], count: int) -> bool:
    """Cheap: false only if fewer than `count` first tokens are the same; answers aside."""
    last = min(count, len(old), len(new)) - 1
    return last < 0 or old[last] == new[last]


def _near(sent: Sent, ids: Sequence[int]) -> Near:
    shared = common_prefix_length(sent.ids, ids)
    if shared < len(sent.ids):
        return Near(sent, None, shared)
    rest = ids[shared:]
    lengths = [(common_prefix_length(answer.ids, rest), answer) for answer in tuple(sent.answers)]
    if not lengths:
        return Near(sent, None, shared)
    length, answer = max(lengths, key=lambda each: each[0])
    return Near(sent, answer, shared + length)
