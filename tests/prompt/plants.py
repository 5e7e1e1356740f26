"""Requests with a planted cache breaker, one kind each, and requests without any. Deterministic."""

from __future__ import annotations

import itertools
import json
import random
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Request = dict[str, Any]
NUM_REQUESTS = 6
_WORDS = (
    "the customer order invoice delivery address refund policy agent reply always polite answer short never promise "
    "discount manager escalate when asked return within thirty days receipt original packaging electronics warranty"
).split()
_QUESTIONS = (
    "Where is my parcel?",
    "How do I return a broken kettle?",
    "Can you change the address on my order?",
    "What does the warranty cover?",
    "Why was I charged twice?",
    "Do you ship to Norway?",
)


def prose(seed: int, sentences: int = 30) -> str:
    """Sentences that are the same for one seed and share nothing with another's."""
    chance = random.Random(seed)
    made = []
    for number in range(sentences):
        words = [*chance.choices(_WORDS, k=9), f"rule{seed}x{number}"]
        made.append(" ".join(words).capitalize() + ".")
    return " ".join(made)


RULES = prose(1)


def chat(system: str, question: str, **more: Any) -> Request:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"messages": messages, **more}


def _each(system: Callable[[int], str]) -> list[Request]:
    return [chat(system(at), _QUESTIONS[at]) for at in range(NUM_REQUESTS)]


def timestamps() -> list[Request]:
    return _each(lambda at: f"Current time: 2026-12-04 10:0{at}:1{at} UTC\n{RULES}")


def dates_in_words() -> list[Request]:
    days = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
    return _each(lambda at: f"Today is {days[at]}, March {at + 1}, 2026. {RULES}")


def epochs() -> list[Request]:
    return _each(lambda at: f"now={1_764_800_000 + at * 977}; {RULES}")


def uuids() -> list[Request]:
    chance = random.Random(7)
    return _each(lambda at: f"Request {uuid.UUID(int=chance.getrandbits(128), version=4)}\n{RULES}")


def hex_ids() -> list[Request]:
    chance = random.Random(8)
    return _each(lambda at: f"trace: a{chance.getrandbits(60):015x}7\n{RULES}")


def nonces() -> list[Request]:
    tokens = ("aB3dE9fG2hJ", "Zk4Lm8Qp1Rs", "xY7tU2vW5zA", "Cd6Ef1Gh9Ij", "qW3eR7tY2uI", "Mn8Bv4Cx6Zl")
    return _each(lambda at: f"Session key {tokens[at]} must not be told. {RULES}")


def counters() -> list[Request]:
    return _each(lambda at: f"This is call number {at * 7 + 3} of today. {RULES}")


def names() -> list[Request]:
    who = ("Alice Smith", "Bob Jones", "Carol White", "Dan Brown", "Erin Stone", "Frank Lake")
    return _each(lambda at: f"You are talking to {who[at]}. {RULES}")


def locales() -> list[Request]:
    codes = ("en-GB", "de-DE", "fr-FR", "nb-NO", "pl-PL", "it-IT")
    return _each(lambda at: f'{{"locale": "{codes[at]}"}}\n{RULES}')


def whitespace() -> list[Request]:
    return _each(lambda at: f"Rules follow.{chr(10) * (at + 1)}{RULES}")


def _tools() -> list[Request]:
    names = ("find_order", "refund_order", "change_address", "open_ticket")
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": prose(40 + at, 4),
                "parameters": {"type": "object", "properties": {"id": {"type": "string"}, "why": {"type": "string"}}},
            },
        }
        for at, name in enumerate(names)
    ]


def tools_reordered() -> list[Request]:
    orders = itertools.islice(itertools.permutations(_tools()), 0, 24, 4)
    return [chat(RULES, question, tools=list(tools)) for question, tools in zip(_QUESTIONS, orders, strict=True)]


def tools_changed() -> list[Request]:
    sets = [_tools()[1:], _tools()[2:], _tools(), [*_tools()[:1], *_tools()[3:]], _tools()[3:], _tools()[:1]]
    return [chat(RULES, question, tools=tools) for question, tools in zip(_QUESTIONS, sets, strict=True)]


def tool_timestamps() -> list[Request]:
    requests = []
    for at, question in enumerate(_QUESTIONS):
        tools = _tools()
        tools[0]["function"]["description"] = f"Orders as of 2026-12-04T10:0{at}:00Z. " + prose(40, 4)
        requests.append(chat(RULES, question, tools=tools))
    return requests


def json_keys_of_tools() -> list[Request]:
    requests = []
    for at, question in enumerate(_QUESTIONS):
        tools = _tools()
        for tool in tools:
            items = list(tool["function"].items())
            tool["function"] = dict(items[at % 3 :] + items[: at % 3])
        requests.append(chat(RULES, question, tools=tools))
    return requests[:3]


def json_keys_in_text() -> list[Request]:
    profile = {"plan": "gold", "region": "north", "language": "English", "since": 2019}
    orders = list(itertools.permutations(profile.items()))
    return _each(lambda at: f"Profile: {json.dumps(dict(orders[at * 4]))}\n{RULES}")


def documents_reordered() -> list[Request]:
    documents = [prose(60 + at, 6) for at in range(4)]
    orders = list(itertools.permutations(documents))

    def system(at: int) -> str:
        listed = "\n\n".join(f"Document {place}: {text}" for place, text in enumerate(orders[at * 4], 1))
        return f"Answer from these documents.\n\n{listed}"

    return _each(system)


def documents_in_the_question() -> list[Request]:
    documents = [f"[{place}] {prose(60 + place, 6)}" for place in range(4)]
    orders = list(itertools.permutations(documents))
    return [chat("Answer.", "\n".join(orders[at * 4]) + "\n" + _QUESTIONS[at]) for at in range(NUM_REQUESTS)]


def _turns(count: int, seed: int) -> list[Request]:
    made: list[Request] = []
    for at in range(count):
        made += [
            {"role": "user", "content": prose(seed + 2 * at, 3)},
            {"role": "assistant", "content": prose(seed + 2 * at + 1, 5)},
        ]
    return made


def messages_reordered() -> list[Request]:
    pairs = [_turns(1, 200 + 10 * at) for at in range(4)]
    orders = list(itertools.permutations(pairs))
    return [
        {"messages": [{"role": "system", "content": RULES}, *itertools.chain(*orders[at * 4]), _question(at)]}
        for at in range(NUM_REQUESTS)
    ]


def _question(at: int) -> Request:
    return {"role": "user", "content": _QUESTIONS[at]}


def edited() -> list[Request]:
    requests = []
    for at in range(NUM_REQUESTS):
        turns = _turns(4, 300)
        turns[1] = {"role": "assistant", "content": prose(400 + at, 5)}
        requests.append({"messages": [{"role": "system", "content": RULES}, *turns, _question(at)]})
    return requests


def truncated() -> list[Request]:
    turns = _turns(10, 500)
    system = {"role": "system", "content": RULES}
    return [{"messages": [system, *turns[2 * at : 2 * at + 8], turns[2 * at + 8]]} for at in range(NUM_REQUESTS)]


def summarized() -> list[Request]:
    turns = _turns(10, 600)
    return [
        {
            "messages": [
                {"role": "system", "content": RULES},
                {"role": "user", "content": prose(700 + at, 3)},
                *turns[2 * at + 1 : 2 * at + 9],
            ]
        }
        for at in range(NUM_REQUESTS)
    ]


def system_changed() -> list[Request]:
    return _each(lambda at: f"{prose(800 + at, 8)}\n\n{RULES}")


def parameters() -> list[Request]:
    return [
        chat(RULES, question, chat_template_kwargs={"enable_thinking": bool(at % 2), "effort": at})
        for at, question in enumerate(_QUESTIONS)
    ]


def salts() -> list[Request]:
    return [chat(RULES, question, cache_salt=f"call-{at}") for at, question in enumerate(_QUESTIONS)]


def question_with_time() -> list[Request]:
    return [
        chat("Be kind.", f"[10:4{at}:09] Read this.\n{RULES}\n{question}") for at, question in enumerate(_QUESTIONS)
    ]


# The function that plants it, and the kind that must be found.
PLANTS: dict[Callable[[], list[Request]], str] = {
    timestamps: "timestamp",
    dates_in_words: "timestamp",
    epochs: "timestamp",
    uuids: "uuid",
    hex_ids: "uuid",
    nonces: "nonce",
    counters: "counter",
    names: "value",
    locales: "value",
    whitespace: "whitespace",
    tools_reordered: "tools_reordered",
    tools_changed: "tools_changed",
    tool_timestamps: "timestamp",
    json_keys_of_tools: "json_keys",
    json_keys_in_text: "json_keys",
    documents_reordered: "documents_reordered",
    documents_in_the_question: "documents_reordered",
    messages_reordered: "messages_reordered",
    edited: "edited",
    truncated: "truncated",
    summarized: "truncated",
    system_changed: "system_changed",
    parameters: "parameters",
    salts: "salt",
    question_with_time: "timestamp",
}


def growing(messages: list[Request]) -> Iterator[Request]:
    """The requests of a conversation: one before each message of the assistant, and the last."""
    for at in range(1, len(messages) + 1):
        if at == len(messages) or messages[at]["role"] == "assistant":
            yield {"messages": messages[:at]}


def clean_chats(shared: Path) -> list[Request]:
    """Conversations that only grow, under one system message, their turns in turn."""
    chats = [list(growing([{"role": "system", "content": RULES}, *_turns(5, 900 + 20 * at)])) for at in range(4)]
    return [request for turn in zip(*chats, strict=True) for request in turn]


def clean_questions(shared: Path) -> list[Request]:
    """MT-bench: two turns each."""
    requests = []
    for line in (shared / "prompts" / "mt_bench_question.jsonl").read_text(encoding="utf-8").splitlines():
        first, second = json.loads(line)["turns"]
        answer = {"role": "assistant", "content": prose(hash(len(first)) + 1000, 8)}
        messages = [{"role": "user", "content": first}, answer, {"role": "user", "content": second}]
        requests += list(growing(messages))
    return requests


def clean_few_shots(shared: Path) -> list[Request]:
    """MMLU: a few-shot prefix a subject, problems of grade-school mathematics behind it."""
    prefixes = json.loads((shared / "prompts" / "mmlu_flan_cot_fewshot_prompts.json").read_text(encoding="utf-8"))
    problems = (shared / "prompts" / "gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines()
    questions = iter([json.loads(line)["question"] for line in problems])
    return [
        {"messages": [{"role": "user", "content": f"{prefix}\n\nQ: {next(questions)}\nA: Let's think step by step."}]}
        for prefix in list(prefixes.values())[:40]
        for _ in range(3)
    ]


def clean_agents(shared: Path) -> list[Request]:
    """SWE-agent sessions, replayed message by message."""
    requests: list[Request] = []
    for path in sorted((shared / "prompts" / "swe-agent").glob("*.traj")):
        history = json.loads(path.read_text(encoding="utf-8"))["history"]
        requests += growing([{"role": message["role"], "content": text_of(message)} for message in history])
    return requests


def text_of(message: Request) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(part.get("text", "") for part in content)
    return content or "-"


CLEAN = (clean_chats, clean_questions, clean_few_shots, clean_agents)
