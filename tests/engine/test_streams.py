"""Mailboxes: nothing is lost however slowly one reads, and unread outputs become few and large."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.core.request import FinishReason
from headstart.core.step import RequestOutput, TokenLogprob
from headstart.engine.streams import Mailbox, merge_outputs


def output(number: int, *, last: bool = False, request_id: str = "r") -> RequestOutput:
    """The `number`-th output of a request, with one token."""
    return RequestOutput(
        request_id,
        token_ids=(number,),
        logprobs=(TokenLogprob(number, -1.0, 1),),
        prompt_logprobs=(TokenLogprob(number + 100, -1.0, 1),) if number == 0 else (),
        finish_reason=FinishReason.LENGTH if last else None,
        num_output_tokens=number + 1,
        time=float(number),
        ledger=(("queue", 0.5),) if number == 0 else (),
    )


def test_merging_joins_tokens_and_keeps_the_newest_state_the_oldest_time_and_the_ledger() -> None:
    merged = merge_outputs([output(0), output(1), output(2, last=True)])
    assert merged.token_ids == (0, 1, 2)
    assert [entry.token_id for entry in merged.logprobs] == [0, 1, 2]
    assert [entry.token_id for entry in merged.prompt_logprobs] == [100]
    assert merged.finish_reason is FinishReason.LENGTH
    assert merged.num_output_tokens == 3
    assert merged.time == 0.0
    assert merged.ledger == (("queue", 0.5),)


@given(st.lists(st.integers(1, 40), max_size=12))
def test_any_rhythm_of_reading_yields_the_same_tokens(bursts: list[int]) -> None:
    async def run() -> None:
        mailbox, numbers, read = Mailbox(), itertools.count(), []
        for burst in bursts:
            for _ in range(burst):
                mailbox.put(output(next(numbers)))
            read += (await mailbox.take()).token_ids
        assert read == list(range(sum(bursts)))

    asyncio.run(run())


async def test_a_thousand_unread_outputs_are_one() -> None:
    mailbox = Mailbox()
    for number in range(1000):
        mailbox.put(output(number))
    assert len(mailbox._unread) <= 16
    merged = await mailbox.take()
    assert merged.token_ids == tuple(range(1000))


async def test_a_reader_that_waits_is_woken_by_an_output_and_by_a_failure() -> None:
    mailbox = Mailbox()
    reader = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    mailbox.put(output(0))
    assert await reader == output(0)
    reader = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    mailbox.fail(KeyError("gone"))
    with pytest.raises(KeyError, match="gone"):
        await reader


async def test_what_came_before_a_failure_is_still_read() -> None:
    mailbox = Mailbox()
    mailbox.put(output(0))
    mailbox.fail(KeyError("gone"))
    assert await mailbox.take() == output(0)
    with pytest.raises(KeyError):
        await mailbox.take()


async def test_a_cancelled_reader_leaves_everything_for_the_next() -> None:
    mailbox = Mailbox()
    reader = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    mailbox.put(output(0))
    assert await mailbox.take() == output(0)
