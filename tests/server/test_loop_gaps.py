"""Large requests of one client do not keep the tokens of the others: how long the event loop does nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from headstart.engine import EngineInfo
from tests.server.conftest import Start
from tests.server.harness import Running

CONTEXT = 8192
INFO = EngineInfo(CONTEXT, CONTEXT // 16, 16, 512, True, "scripted")
MAX_GAP = 0.06  # seconds; what these requests took before they were kept off the loop: 0.15 to 1


async def watch_gaps(end: asyncio.Event) -> float:
    """The longest time that passed between two turns of a task that always wants its next turn."""
    loop = asyncio.get_running_loop()
    longest, last = 0.0, loop.time()
    while not end.is_set():
        await asyncio.sleep(0)
        now = loop.time()
        longest, last = max(longest, now - last), now
    return longest


def longest_gap(running: Running, action: Callable[[], object]) -> float:
    end = running.call(asyncio.Event)
    watch = asyncio.run_coroutine_threadsafe(watch_gaps(end), running.loop)
    action()
    running.call(end.set)
    return watch.result(20)


MANY_MESSAGES = [{"role": "user", "content": "x"}] * 10_000
REQUESTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "detokenize": ("/detokenize", {"tokens": [5] * CONTEXT}, 200),
    "detokenize too many": ("/detokenize", {"tokens": [5] * 400_000}, 400),
    "tokenize messages": ("/tokenize", {"messages": MANY_MESSAGES, "return_token_strs": True}, 400),
    "tokenize": ("/tokenize", {"prompt": "day " * 8000, "return_token_strs": True}, 200),
    "a large chat": ("/v1/chat/completions", {"messages": MANY_MESSAGES}, 400),
    "a batch": ("/v1/completions", {"prompt": ["Once upon a time there was a cat. " * 10] * 256, "max_tokens": 1}, 200),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_large_requests_leave_the_loop_free(start: Start, name: str) -> None:
    route, body, status = REQUESTS[name]
    running, _ = start(info=INFO)
    content = json.dumps(body).encode()

    def post() -> None:
        headers = {"content-type": "application/json"}
        response = running.client.post(route, content=content, headers=headers)
        assert response.status_code == status, response.text[:300]

    gaps = []
    for _ in range(5):  # another process may have had the core; the loop itself is the same each time
        gaps.append(longest_gap(running, post))
        if gaps[-1] < MAX_GAP:
            return
    pytest.fail(f"the event loop stood still for {min(gaps):.3f} s")


def test_what_the_context_cannot_use_is_no_body(start: Start) -> None:
    running, _ = start(info=INFO)
    limit = (1 << 20) + 32 * CONTEXT
    for size, status in ((limit, 400), (limit + 1, 413)):
        content = b'{"pad":"' + b"x" * (size - 10) + b'"}'
        assert len(content) == size
        response = running.client.post("/detokenize", content=content, headers={"content-type": "application/json"})
        assert response.status_code == status
