"""The parts that need no server: merging, the ledger, parameters, log-probability names, the listening socket."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.config import ServerConfig
from headstart.core.step import RequestOutput
from headstart.metrics.ledger import PARTS
from headstart.server import AddressError, listen, url_of
from headstart.server.connection import JoiningTransport
from headstart.server.logprobs import num_characters
from headstart.server.merge import merge
from headstart.server.params import nth_seed
from headstart.server.timing import Stamps, server_timing


class Source:
    """A generator that can be looked at: what it gave, and whether it was closed."""

    def __init__(self, items: list[int], error: Exception | None = None, endless: bool = False) -> None:
        self.items, self.error, self.endless, self.closed = items, error, endless, False

    async def run(self) -> AsyncGenerator[int, None]:
        try:
            for item in self.items:
                await asyncio.sleep(0)
                yield item
            if self.error is not None:
                raise self.error
            if self.endless:
                await asyncio.Event().wait()
        finally:
            self.closed = True


@given(lists=st.lists(st.lists(st.integers(), max_size=5), min_size=1, max_size=4))
async def test_merged_sources_lose_nothing_and_keep_their_order(lists: list[list[int]]) -> None:
    tagged = [[number * 100 + at for at in range(len(items))] for number, items in enumerate(lists)]
    sources = [Source(items) for items in tagged]
    found = [item async for item in merge([source.run() for source in sources])]
    for number, items in enumerate(tagged):
        assert [item for item in found if item // 100 == number] == items
    assert len(found) == sum(map(len, lists))
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("count", [1, 3])
async def test_an_error_of_one_ends_all(count: int) -> None:
    sources = [Source([1], error=ValueError("bad")), *[Source([2, 3], endless=True) for _ in range(count - 1)]]
    with pytest.raises(ValueError, match="bad"):
        async for _ in merge([source.run() for source in sources]):
            pass
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("count", [1, 3])
async def test_closing_the_merge_closes_the_sources(count: int) -> None:
    sources = [Source([1, 2], endless=True) for _ in range(count)]
    merged = merge([source.run() for source in sources])
    await anext(merged)
    await merged.aclose()
    assert all(source.closed for source in sources)


DURATION = st.floats(0, 100)


@given(
    times=st.lists(DURATION, min_size=3, max_size=3), parts=st.lists(DURATION, min_size=5, max_size=5), late=DURATION
)
def test_the_ledger_sums_exactly(times: list[float], parts: list[float], late: float) -> None:
    received, parsed, submitted = sorted(times)
    names = ("admit", "queue", "prefill", "interference", "sample")
    first = RequestOutput("r", ledger=tuple(zip(names, parts, strict=True)))
    written = submitted + sum(parts) + late
    ledger = Stamps(received, parsed, submitted).ledger(first, written)
    assert [part for part, _ in ledger] == list(PARTS)
    assert sum(seconds for _, seconds in ledger) == pytest.approx(written - received)
    assert dict(ledger)["deliver"] == pytest.approx(late, abs=1e-9)
    header = server_timing(ledger).decode()
    token = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
    assert re.fullmatch(rf"{token};dur=-?\d+\.\d+(, {token};dur=-?\d+\.\d+)*", header)  # W3C Server Timing


@given(text=st.text(st.characters(exclude_categories=["Cs"])), cut=st.integers(0, 100))
def test_characters_are_counted_where_they_begin(text: str, cut: int) -> None:
    raw = text.encode()
    assert num_characters(raw[:cut]) + num_characters(raw[cut:]) == len(text)


def test_choices_have_seeds_of_their_own() -> None:
    seeds = [nth_seed(seed, index) for seed in (0, 1, 2, 3, (1 << 63) - 1) for index in range(16)]
    assert len(set(seeds)) == len(seeds), "requests with neighbouring seeds share no choice"
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert seeds[::16] == [0, 1, 2, 3, (1 << 63) - 1], "the first choice is the answer to n=1"


def test_an_address_in_use_is_one_clear_line() -> None:
    with listen(ServerConfig(port=0)) as first:
        port = first.getsockname()[1]
        assert url_of(first) == f"http://127.0.0.1:{port}"
        with pytest.raises(AddressError, match=rf"port {port}.*--port"):
            listen(ServerConfig(port=port))
    with pytest.raises(AddressError, match="no-such-host"):
        listen(ServerConfig(host="no-such-host.invalid", port=0))


class Recorder(asyncio.Transport):
    """A transport that notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:  # type: ignore[override]
        self.written.append(bytes(data))

    def close(self) -> None:
        self.closed = True


def test_a_held_write_goes_out_with_the_next() -> None:
    recorder = Recorder()
    transport = JoiningTransport(recorder)
    transport.write(b"a")
    transport.hold_next_write()
    transport.write(b"b")
    assert recorder.written == [b"a"]
    transport.write(b"c")
    transport.write(b"d")
    assert recorder.written == [b"a", b"bc", b"d"]


def test_a_held_write_is_not_lost_at_the_end() -> None:
    recorder = Recorder()
    transport = JoiningTransport(recorder)
    transport.hold_next_write()
    transport.write(b"a")
    transport.close()
    assert recorder.written == [b"a"]
    assert recorder.closed
