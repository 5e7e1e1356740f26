"""What is remembered of sent prompts, against a plain model of it; and what is said of a prompt beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from headstart.prompt import read_request
from headstart.prompt.explain import Explanation, explain
from headstart.prompt.kinds import Kind
from headstart.prompt.sent import MAX_PROMPTS, Sent, SentPrompts, nearest

BLOCK = 4
LIMIT = 12_000
IDS = st.lists(st.integers(0, 2), max_size=24).map(tuple)


class Remembering(RuleBasedStateMachine):
    """Memory of a few prompts. The model: all that were added, by tenant, in order."""

    sents = Bundle("sents")

    def __init__(self) -> None:
        super().__init__()
        self.memory = SentPrompts(LIMIT)
        self.added: dict[str, list[Sent]] = {}

    @rule(target=sents, ids=IDS, tenant=st.sampled_from("ab"), body_bytes=st.integers(0, 3_000))
    def add(self, ids: tuple[int, ...], tenant: str, body_bytes: int) -> Sent:
        sent = Sent(ids, "", None)
        self.memory.add(tenant, sent, body_bytes)
        self.added.setdefault(tenant, []).append(sent)
        assert sent.remembered  # the newest is the last to be forgotten
        return sent

    @rule(sent=sents, ids=IDS)
    def answer(self, sent: Sent, ids: tuple[int, ...]) -> None:
        before = len(sent.answers)
        known = sent.remembered
        self.memory.answered(sent, ids, "x" * len(ids))
        assert len(sent.answers) == before + (known and bool(ids))

    @rule(body_bytes=st.just(LIMIT))
    def add_what_never_fits(self, body_bytes: int) -> None:
        sent = Sent((1,), "", None)
        self.memory.add("a", sent, body_bytes)
        assert not sent.remembered

    @invariant()
    def the_latest_are_remembered(self) -> None:
        total = 0
        for tenant, added in self.added.items():
            found = self.memory.candidates(tenant)
            kept = [sent for sent in added if sent.remembered]
            assert found == kept[::-1]
            assert kept == added[len(added) - len(kept) :]  # only the oldest went
            total += sum(sent.num_bytes for sent in kept)
        assert self.memory.num_bytes == total <= LIMIT


TestRemembering = Remembering.TestCase


def test_a_tenant_has_so_many_and_no_more() -> None:
    memory = SentPrompts(1 << 30)
    sents = [Sent((index,), "", None) for index in range(MAX_PROMPTS + 5)]
    for sent in sents:
        memory.add("a", sent, 0)
    memory.add("b", Sent((1,), "", None), 0)
    assert memory.candidates("a") == sents[5:][::-1]
    assert len(memory.candidates("b")) == 1


@given(olds=st.lists(st.tuples(IDS, IDS), max_size=12), new=IDS)
def test_the_nearest_is_the_one_that_shares_most(
    olds: list[tuple[Sequence[int], Sequence[int]]], new: Sequence[int]
) -> None:
    memory = SentPrompts(1 << 30)
    for ids, answer in olds:
        sent = Sent(ids, "", None)
        memory.add("", sent, 0)
        memory.answered(sent, answer, "")

    def shared(whole: Sequence[int]) -> int:
        return next(
            (at for at, (a, b) in enumerate(zip(whole, new, strict=False)) if a != b), min(len(whole), len(new))
        )

    found = nearest(memory.candidates(""), "", new, BLOCK)
    best = max((shared((*ids, *answer)) // BLOCK for ids, answer in olds), default=None)
    assert [near.num_shared // BLOCK for near in found[:1]] == ([] if best is None else [best])
    for near in found:
        assert near.num_shared == shared((*near.sent.ids, *(near.answer.ids if near.answer else ())))


def told(new: dict[str, Any], *olds: dict[str, Any]) -> Explanation:
    """Token ids are the characters' codes, as a template might print them."""
    sents = [Sent(ids_of(old), "", old) for old in reversed(olds)]
    return explain(sents, "", ids_of(new), read_request(new), BLOCK)


def ids_of(body: dict[str, Any]) -> tuple[int, ...]:
    return tuple(map(ord, "".join(f"<{part.role}>{part.text}" for part in read_request(body).parts)))


def one(system: str, question: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": question}], **fields}


RULES = "Answer in one paragraph. Never guess: say what you do not know. Quote your sources."


def test_of_several_the_one_of_the_same_kind_is_compared() -> None:
    """Prompts of other applications begin with the same few tokens; the latest of them says nothing."""
    mine = one(f"Today is 2026-03-01. {RULES}", "Why is the sky blue?")
    others = [one(f"{word} what follows into French, and nothing else.", "Hello there") for word in ("Turn", "Tell")]
    found = told(one(f"Today is 2026-03-02. {RULES}", "Why is grass green?"), mine, *others)
    assert found.kind is Kind.TIMESTAMP


def test_another_application_is_no_breaker() -> None:
    found = told(one("Translate into French, and nothing else.", "Hello there"), one(RULES, "Why is the sky blue?"))
    assert found.kind is Kind.NEW_TEXT


def test_reordered_tools_and_keys() -> None:
    tools = [
        {"function": {"name": name, "description": f"Does the {name} thing for you"}} for name in ("open", "close")
    ]
    old = one(RULES, "Why is the sky blue?", tools=tools)
    assert told(one(RULES, "Why is the sky blue?", tools=tools[::-1]), old).kind is Kind.TOOLS_REORDERED
    flipped = [{"function": dict(reversed(tools[0]["function"].items()))}, tools[1]]
    assert told(one(RULES, "Why is the sky blue?", tools=flipped), old).kind is Kind.KEYS_REORDERED


def test_an_answer_that_is_printed_otherwise() -> None:
    """The text came back as it was, but not its tokens."""
    body = one(RULES, "Why is the sky blue?")
    answer = "Light scatters, blue light most of all."
    sent = Sent(ids_of(body), "", body)
    memory = SentPrompts(1 << 20)
    memory.add("", sent, 100)
    memory.answered(sent, (*range(900, 920), 2), answer)
    turn = {
        "messages": [*body["messages"], {"role": "assistant", "content": answer}, {"role": "user", "content": "Why?"}]
    }
    found = explain([sent], "", ids_of(turn), read_request(turn), BLOCK)
    assert found.kind is Kind.RENDERED_OTHERWISE
    as_sampled = (*ids_of(body), *range(900, 920), 7, 8, 9)
    assert explain([sent], "", as_sampled, read_request(turn), BLOCK).kind is Kind.CONTINUED


def test_evicted_counts_what_had_keys_and_values() -> None:
    """A prompt's last token is always computed, and an answer's last token never was."""
    found = Explanation(num_tokens=33, num_shared=33, num_held=32, kind=Kind.CONTINUED, divergence=None)
    assert found.told(32, BLOCK)["kind"] == "continued"
    assert found.told(28, BLOCK)["kind"] == "evicted"
    whole = Explanation(num_tokens=32, num_shared=32, num_held=32, kind=Kind.CONTINUED, divergence=None)
    assert whole.told(28, BLOCK)["kind"] == "continued"
    assert whole.told(24, BLOCK)["kind"] == "evicted"
