"""Logs of chat requests with one cache breaker planted in each, and logs without any. The same bytes every time."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headstart.prompt import Kind

DATA = Path(__file__).parents[3] / "shared" / "data" / "prompts"
REQUESTS = 8
Request = dict[str, Any]
_TEXTS = [
    "You help the customers of a shop that sells lamps, chairs and tables made of oak.",
    "Answer in at most three sentences, and name the article when you speak of one.",
    "Never promise a date of delivery, since the warehouse decides about it every morning.",
    "If somebody is angry, say that you are sorry before you say anything else.",
    "Prices include taxes, but not the transport to islands and mountain huts.",
]
RULES = " ".join(_TEXTS)
PASSAGES = [
    "Lamps need bulbs of at most forty watts; brighter ones burn the paper shade.",
    "Chairs carry a hundred and twenty kilograms and come with four felt pads.",
    "Tables are oiled twice before they leave us, and should be oiled every spring.",
    "Returns are free for a month if the parcel is still closed and dry.",
    "The workshop repairs what it has sold, also many years later, for a small fee.",
]
QUESTIONS = [
    "Which bulb fits?", "How heavy may I be?", "When do I oil it?", "Can it go back?", "Who repairs it?",
    "Is it dear?", "Do you ship abroad?", "What wood is it?",
]  # fmt: skip


def ask(system: str, question: str, **fields: Any) -> Request:
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": question}], **fields}


def _in_system(value: Callable[[int], str], lead: str = "Now: ") -> Iterator[Request]:
    for index in range(REQUESTS):
        yield ask(f"{lead}{value(index)}. {RULES}", QUESTIONS[index])


def _tools(index: int, names: list[str]) -> list[dict[str, Any]]:
    about = dict(zip("abcde", PASSAGES, strict=True))
    return [{"type": "function", "function": {"name": n, "description": about[n], "parameters": {}}} for n in names]


def _reordered_tools() -> Iterator[Request]:
    for index in range(REQUESTS):
        names = list("abcde")
        random.Random(index).shuffle(names)
        yield ask(RULES, QUESTIONS[index], tools=_tools(index, names))


def _changed_tools() -> Iterator[Request]:
    for index in range(REQUESTS):
        yield ask(RULES, QUESTIONS[index], tools=_tools(index, list("abcde")[index % 3 :]))


def _reordered_keys() -> Iterator[Request]:
    for index in range(REQUESTS):
        tools = _tools(index, list("abcde"))
        if index % 2:
            tools = [dict(reversed(tool.items())) for tool in tools]
        yield ask(RULES, QUESTIONS[index], tools=tools)


def _reordered_passages() -> Iterator[Request]:
    for index in range(REQUESTS):
        passages = PASSAGES.copy()
        random.Random(index).shuffle(passages)
        yield ask(RULES, "\n\n".join([*passages, QUESTIONS[index]]))


def _conversation(turns: int) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": RULES}]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{QUESTIONS[turn]} {PASSAGES[turn % 5][::-1]}"})
        messages.append({"role": "assistant", "content": f"{PASSAGES[turn % 5]} That is all about {QUESTIONS[turn]}"})
    return messages


def _edited_message() -> Iterator[Request]:
    for turns in range(2, REQUESTS):
        messages = _conversation(turns)
        messages[1] = {"role": "user", "content": f"Summary after {'many ' * turns}turns of talk about lamps"}
        yield {"messages": messages[:-1]}


def _truncated_history() -> Iterator[Request]:
    for turns in range(4, REQUESTS + 1):
        messages = _conversation(turns)
        yield {"messages": [messages[0], *messages[2 * (turns - 4) + 1 : -1]]}


def _inserted_message() -> Iterator[Request]:
    for turns in range(2, REQUESTS):
        messages = _conversation(turns)[:-1]
        messages.insert(1, {"role": "user", "content": "The customer is looking at a " + "very " * turns + "old lamp"})
        yield {"messages": messages}
        messages = [*_conversation(turns), {"role": "user", "content": QUESTIONS[turns]}]
        yield {"messages": messages}


def _reordered_messages() -> Iterator[Request]:
    for index in range(REQUESTS):
        examples = [{"role": "user", "content": passage} for passage in PASSAGES]
        random.Random(index).shuffle(examples)
        yield {"messages": [*examples, {"role": "user", "content": QUESTIONS[index]}]}


def _whitespace() -> Iterator[Request]:
    for index in range(REQUESTS):
        yield ask(_TEXTS[0] + " " * (1 + index % 2) + " ".join(_TEXTS[1:]), QUESTIONS[index])


def _changed_system() -> Iterator[Request]:
    openings = ["Be short and kind.", "You are an expert who has read everything about wood.", "Think before speaking!"]
    for index in range(REQUESTS):
        yield ask(f"{openings[index % 3]}\n{RULES}", QUESTIONS[index])


def _question_first() -> Iterator[Request]:
    for index in range(REQUESTS):
        yield {"messages": [{"role": "user", "content": f"{QUESTIONS[index]} Please tell me now.\n\n{RULES}"}]}


def _uuid(index: int) -> str:
    return str(uuid.UUID(int=random.Random(index).getrandbits(128), version=4))


def _nonce(index: int) -> str:
    return "".join(random.Random(index).choices("GHJKLMNPQRSTVWXYZghjkmnpqrstvwxyz23456789", k=11)) + "7z"


def planted() -> dict[str, tuple[Kind, list[Request]]]:
    """By name: the kind that must be found, and the log."""
    names = ["Alice", "Bob", "Carla", "Dmitri", "Esra", "Farid", "Gudrun", "Hal"]
    locales = ["en-US", "de-CH", "fr-FR", "it-IT", "ja-JP", "pt-BR", "sv-SE", "tr-TR"]
    days = ["Monday, March 2", "Tuesday, March 3", "Wednesday, March 4", "Thursday, March 5"]
    logs: dict[str, tuple[Kind, Iterator[Request]]] = {
        "iso timestamp": (Kind.TIMESTAMP, _in_system(lambda i: f"2026-03-01T12:{i * 7:02}:0{i}Z")),
        "clock": (Kind.TIMESTAMP, _in_system(lambda i: f"it is {9 + i}:15")),
        "date in words": (Kind.TIMESTAMP, _in_system(lambda i: days[i % 4])),
        "unix time": (Kind.TIMESTAMP, _in_system(lambda i: str(1767225600 + 977 * i))),
        "uuid": (Kind.UUID, _in_system(_uuid, "Session ")),
        "hex id": (Kind.HEX_ID, _in_system(lambda i: f"{0xA1B2C3D4E5 * (i + 3):x}a1", "Trace ")),
        "counter": (Kind.COUNTER, _in_system(lambda i: str(41 + i), "Request number ")),
        "nonce": (Kind.NONCE, _in_system(_nonce, "Key ")),
        "user name": (Kind.VALUE, _in_system(lambda i: names[i], "You talk to ")),
        "locale": (Kind.VALUE, _in_system(lambda i: locales[i], "Locale ")),
        "prompt version": (Kind.VERSION, _in_system(lambda i: f"v2.{i}.1", "Shop assistant ")),
        "reordered tools": (Kind.TOOLS_REORDERED, _reordered_tools()),
        "changed tools": (Kind.TOOLS_CHANGED, _changed_tools()),
        "reordered keys": (Kind.KEYS_REORDERED, _reordered_keys()),
        "reordered passages": (Kind.DOCUMENTS_REORDERED, _reordered_passages()),
        "edited message": (Kind.MESSAGE_EDITED, _edited_message()),
        "truncated history": (Kind.HISTORY_TRUNCATED, _truncated_history()),
        "inserted message": (Kind.MESSAGE_INSERTED, _inserted_message()),
        "reordered messages": (Kind.MESSAGES_REORDERED, _reordered_messages()),
        "whitespace": (Kind.WHITESPACE, _whitespace()),
        "changed system prompt": (Kind.SYSTEM_CHANGED, _changed_system()),
        "question first": (Kind.VARIABLE_FIRST, _question_first()),
        "salt": (Kind.SALT, (ask(RULES, QUESTIONS[i], cache_salt=f"s{i}") for i in range(REQUESTS))),
        "template": (
            Kind.TEMPLATE,
            (ask(RULES, QUESTIONS[i], chat_template_kwargs={"id": i}) for i in range(REQUESTS)),
        ),
    }
    return {name: (kind, list(log)) for name, (kind, log) in logs.items()}


def clean() -> dict[str, list[Request]]:
    """Logs in which every shared prefix is found."""
    chats = [{"messages": _conversation(turns)[:-1]} for turns in range(1, REQUESTS + 1)]
    lines = (DATA / "mt_bench_question.jsonl").read_text(encoding="utf-8").splitlines()
    mt_bench = []
    for line in lines:
        first, second = (json.loads(line)["turns"] + [""])[:2]
        opening = [{"role": "user", "content": first}]
        mt_bench += [{"messages": opening}, {"messages": [*opening, {"role": "assistant", "content": "Well."},
                                                          {"role": "user", "content": second}]}]  # fmt: skip
    shots = json.loads((DATA / "mmlu_flan_cot_fewshot_prompts.json").read_text(encoding="utf-8"))
    mmlu = [
        {"messages": [{"role": "user", "content": f"{prefix}\n\nQ: {question}\nA: Let's think step by step."}]}
        for prefix in shots.values()
        for question in QUESTIONS[:3]
    ]
    tenants = [ask(RULES, QUESTIONS[i % 8], cache_salt=f"tenant-{i % 2}") for i in range(12)]
    problems = (DATA / "gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines()[:200]
    gsm8k = [ask(RULES, json.loads(line)["question"]) for line in problems]
    return {
        "chat": chats, "mt-bench": mt_bench, "mmlu": mmlu, "gsm8k": gsm8k, "tenants": tenants, "agents": agents(),
    }  # fmt: skip


def agents() -> list[Request]:
    """Agent sessions, message by message, as an agent sends them."""
    log: list[Request] = []
    for path in sorted((DATA / "swe-agent").glob("*.traj")):
        history = json.loads(path.read_text(encoding="utf-8"))["history"]
        messages = [{"role": message["role"], "content": message.get("content") or ""} for message in history]
        ends = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        log += [{"messages": messages[:end]} for end in ends if end]
    return log
