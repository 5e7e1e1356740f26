"""Messages survive the wire, bytes that are none are refused, and a channel wakes its waiter."""

from __future__ import annotations

import dataclasses
import os
import stat
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.core.connector import TierState
from headstart.core.request import EngineRequest, FinishReason, SamplingParams
from headstart.core.stats import CoreStats
from headstart.core.step import RequestOutput, TokenLogprob
from headstart.engine import ipc
from headstart.engine.ipc import (
    Abort,
    Add,
    Channel,
    Dead,
    EngineInfo,
    FromEngine,
    IPCError,
    NotConnectedError,
    Outputs,
    Ping,
    Pong,
    Progress,
    Ready,
    Refused,
    Shutdown,
    SocketDirectory,
    ToEngine,
    api_codec,
    engine_codec,
)

TO_ENGINE, FROM_ENGINE = api_codec(), engine_codec()

counts = st.integers(0, 2**40)
tokens = st.lists(st.integers(0, 2**32), max_size=8).map(tuple)
floats = st.floats(allow_nan=False)
names = st.text(max_size=12)
params = st.builds(
    SamplingParams,
    max_tokens=st.integers(0, 2**31),
    temperature=st.floats(0, 1e6),
    logit_bias=st.lists(st.tuples(counts, floats), max_size=3).map(tuple),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.none() | st.integers(0, 2**31),
    stop_token_ids=tokens,
)
requests = st.builds(
    EngineRequest, names, tokens, params, arrival_time=floats, priority=st.integers(-9, 9), cache_salt=names
)
logprobs = st.lists(
    st.builds(TokenLogprob, counts, floats, counts, st.lists(st.tuples(counts, floats), max_size=2).map(tuple)),
    max_size=3,
).map(tuple)
outputs = st.builds(
    RequestOutput,
    request_id=names,
    token_ids=tokens,
    logprobs=logprobs,
    prompt_logprobs=logprobs,
    finish_reason=st.none() | st.sampled_from(FinishReason),
    stop_token_id=st.none() | counts,
    error=st.none() | names,
    time=floats,
    num_cached_tokens=counts,
    num_output_tokens=counts,
    num_preemptions=counts,
    ledger=st.lists(st.tuples(names, floats), max_size=4).map(tuple),
)
histograms = {
    "prefill_steps": st.lists(counts, max_size=30).map(tuple),
    "step_ratios": st.lists(counts, max_size=30).map(tuple),
    "step_ratios_sum": st.floats(0, 1e9),
}
tiers = st.lists(st.builds(TierState, names, st.booleans(), counts, counts), max_size=2).map(tuple)
stats = st.builds(
    CoreStats, **{item.name: counts for item in dataclasses.fields(CoreStats)} | histograms | {"tiers": tiers}
)
infos = st.builds(EngineInfo, counts, counts, counts, counts, st.booleans(), names)
to_engine = st.one_of(
    st.builds(Add, requests),
    st.builds(Abort, st.lists(names, max_size=4).map(tuple)),
    st.builds(Ping, counts),
    st.builds(Shutdown),
)
from_engine = st.one_of(
    st.builds(Progress, names, counts, st.none() | counts),
    st.builds(Ready, infos, stats),
    st.builds(Outputs, st.lists(outputs, max_size=4).map(tuple), stats),
    st.builds(Refused, names, names, st.none() | st.tuples(counts, counts)),
    st.builds(Pong, counts, stats),
    st.builds(Dead, names, st.booleans()),
)


@given(to_engine)
def test_messages_to_the_engine_survive(message: ToEngine) -> None:
    assert FROM_ENGINE.decode(TO_ENGINE.encode(message)) == message


@given(from_engine)
def test_messages_from_the_engine_survive(message: FromEngine) -> None:
    assert TO_ENGINE.decode(FROM_ENGINE.encode(message)) == message


@given(st.binary(max_size=64) | from_engine.map(FROM_ENGINE.encode).map(lambda data: data[:-1]))
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    try:
        message = FROM_ENGINE.decode(data)
    except IPCError:
        return
    assert isinstance(message, ToEngine)  # the bytes happened to be one


def test_a_message_of_the_wrong_type_is_refused() -> None:
    bad = msgspec.msgpack.encode(["abort", "not a list"])
    with pytest.raises(IPCError, match="no message"):
        FROM_ENGINE.decode(bad)
    with pytest.raises(IPCError, match="no message"):
        TO_ENGINE.decode(TO_ENGINE.encode(Ping(1)))  # the other direction's


@pytest.mark.parametrize(("request_id", "token_id"), [("r", 1 << 70), ("\ud800", 1)])
def test_what_the_wire_cannot_hold_is_refused_before_it_is_sent(request_id: str, token_id: int) -> None:
    request = EngineRequest(request_id, (token_id,), SamplingParams(max_tokens=1), 0.0)
    with pytest.raises(IPCError, match="cannot send Add"):
        TO_ENGINE.encode(Add(request))


def test_a_message_past_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(IPCError, match=r"takes \d+ bytes; the limit is 100"):
        TO_ENGINE.encode(Abort(("x" * 100,)))


def test_the_socket_directory_is_private_and_short(tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch) -> None:
    deep = os.path.join(tmp_path, "d" * 120)
    os.mkdir(deep)
    monkeypatch.setattr("tempfile.tempdir", deep)
    directory = SocketDirectory()
    try:
        assert stat.S_IMODE(os.stat(directory.path).st_mode) == 0o700
        assert len(directory.address) < 107
        assert os.listdir(deep) == []
    finally:
        directory.remove()
    assert not os.path.exists(directory.path)


Ends = tuple[Channel[ToEngine, FromEngine], Channel[FromEngine, ToEngine]]


@pytest.fixture
def ends() -> Iterator[Ends]:
    directory = SocketDirectory()
    api = Channel(api_codec(), directory.address, bind=True)
    engine = Channel(engine_codec(), directory.address, bind=False)
    engine.send(Dead("hello"))
    api.wait(10)
    assert api.receive() == Dead("hello")
    yield api, engine
    api.close(0)
    engine.close(0)
    directory.remove()


def test_a_channel_carries_messages_in_order(ends: Ends) -> None:
    api, engine = ends
    assert api.receive() is None
    for number in range(500):
        api.send(Ping(number))
    received: list[object] = []
    while len(received) < 500:
        engine.wait(10)
        while (message := engine.receive()) is not None:
            received.append(message)
    assert received == [Ping(number) for number in range(500)]


def test_wake_ends_a_wait_from_another_thread_and_is_not_lost(ends: Ends) -> None:
    _, engine = ends
    engine.wake()
    engine.wait(60)  # before
    for _ in range(100_000):
        engine.wake()  # a full pipe does not block
    engine.wait(60)
    started = time.monotonic()
    engine.wait(0.01)  # all of them are used up
    assert time.monotonic() - started >= 0.009
    timer = threading.Thread(target=engine.wake)
    timer.start()
    engine.wait(60)  # during
    timer.join()


def test_sending_with_nobody_connected_says_so() -> None:
    directory = SocketDirectory()
    api = Channel(api_codec(), directory.address, bind=True)
    try:
        with pytest.raises(NotConnectedError):
            api.send(Ping(1))
    finally:
        api.close(0)
        directory.remove()
