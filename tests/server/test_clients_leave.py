"""200 clients that leave in the queue, in prefill and in decode, against a real engine: nothing of them may stay.

The tiny model is too fast to leave it by the clock, so each wave is built up until the engine itself says that three
requests decode, one is in prefill and six wait; then all ten leave. `benchmarks/client_leaves.py` does it by the clock,
with the default model.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from headstart.config import SchedulerConfig
from headstart.core.stats import CoreStats
from tests.server.real import Served, serving_stories

WAVES = 20
DECODING, WAITING = 3, 6  # of a wave; one more is in prefill
# Beside decodes a step has room for two tokens of prefill.
SLOW_PREFILL = SchedulerConfig(max_num_seqs=DECODING + 1, max_num_batched_tokens=DECODING + 2)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving_stories(tmp_path_factory.mktemp("left") / "stories", SLOW_PREFILL) as served:
        yield served


def wait_for(served: Served, condition: Callable[[CoreStats], bool]) -> CoreStats:
    deadline = time.monotonic() + 30
    while not condition(stats := served.stats()):
        assert time.monotonic() < deadline, stats
    return stats


def num_tasks(served: Served) -> int:
    return served.running.call(lambda: len(asyncio.all_tasks()))


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, 500) for _ in range(length)]


def send(served: Served, prompt: list[int], max_tokens: int, *, stream: bool) -> socket.socket:
    """A request on a connection of its own, sent and not waited for."""
    fields = {"prompt": prompt, "max_tokens": max_tokens, "stream": stream, "ignore_eos": True, "temperature": 0}
    body = json.dumps(fields).encode()
    client = served.running.connect()
    client.settimeout(60)
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    return client


def leave(client: socket.socket, *, abruptly: bool) -> str:
    """Close the connection, by a reset if `abruptly`. Says whether anything of the answer was there by then."""
    client.setblocking(False)
    try:
        seen = "answered" if client.recv(1) else "closed"
    except BlockingIOError:
        seen = "unanswered"
    if abruptly:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    return seen


def build_wave(served: Served, rng: random.Random, before: CoreStats) -> dict[str, list[socket.socket]]:
    """Ten requests, each where it shall be left: the engine's own numbers say so."""
    decoding = []
    for _ in range(DECODING):
        decoding.append(send(served, prompt_of(rng, 3), 500, stream=True))
        decoding[-1].recv(1)  # the headers have waited for the first token
    prefill = [send(served, prompt_of(rng, 480), 8, stream=rng.random() < 0.5)]
    computed = before.prompt_tokens_computed + DECODING * 3
    wait_for(served, lambda stats: stats.num_running == DECODING + 1 and stats.prompt_tokens_computed > computed)
    waiting = [send(served, prompt_of(rng, 400), 100, stream=rng.random() < 0.5) for _ in range(WAITING)]
    wait_for(served, lambda stats: stats.num_waiting == WAITING or stats.num_running < DECODING + 1)
    return {"decode": decoding, "prefill": prefill, "queue": waiting}


def ask_normally(served: Served, rng: random.Random) -> None:
    body = {"prompt": prompt_of(rng, 60), "max_tokens": 8, "ignore_eos": True}
    answer = served.running.client.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 8


def test_two_hundred_clients_that_leave_free_everything(served: Served) -> None:
    rng = random.Random(0)
    ask_normally(served, rng)
    before, tasks = served.stats(), num_tasks(served)
    assert before.num_free_blocks == before.num_blocks
    left: Counter[tuple[str, str]] = Counter()
    for _ in range(WAVES):
        at_begin = served.stats()
        wave = build_wave(served, rng, at_begin)
        clients = [(stage, client) for stage, of_stage in wave.items() for client in of_stage]
        rng.shuffle(clients)
        for stage, client in clients:
            left[stage, leave(client, abruptly=rng.random() < 0.5)] += 1
        gone = wait_for(served, lambda stats: stats.num_running == stats.num_waiting == 0)
        assert gone.finished - at_begin.finished == len(clients)
        wait_for(served, lambda stats: stats.num_free_blocks == stats.num_blocks)

    after = served.stats()
    assert sum(left.values()) == 200
    # Each stage was really met. A machine that stops this process for long may let some requests go on meanwhile.
    assert left["decode", "answered"] == WAVES * DECODING
    assert left["prefill", "unanswered"] > WAVES * 0.7
    assert left["queue", "unanswered"] > WAVES * WAITING * 0.7
    assert after.aborts - before.aborts > 200 * 0.9
    ask_normally(served, rng)  # how fast, is for the benchmark to say
    served.running.client.close()
    deadline = time.monotonic() + 10
    while num_tasks(served) > tasks:
        assert time.monotonic() < deadline, "tasks of clients that left are still there"
