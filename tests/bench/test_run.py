"""Whole runs against scripted servers: every workload, two servers, errors, interruption, the report's file."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headstart.bench import BenchError, BenchOptions
from headstart.bench.options import LengthDist
from headstart.bench.report import Report, read_report, write_report
from headstart.bench.run import run_async
from headstart.bench.table import print_report
from tests.bench.scripted import Call, ScriptedServer, answer, scripted_server

QUICK: dict[str, Any] = {"rate": 1000.0, "short_interval": 0.001, "timeout": 60.0, "speed": 1000.0}


def options(url: str, **changes: Any) -> BenchOptions:
    return replace(BenchOptions(url=url), **(QUICK | changes))


def prompt_of(call: Call) -> str:
    return " ".join(message["content"] for message in call.body["messages"])


def by_group(report: Report, group: str) -> list[Any]:
    return [record for record in report.records if record.group == group]


async def test_idle_sends_exact_lengths_one_at_a_time() -> None:
    open_at_once: list[int] = []
    now_open = 0

    async def script(call: Call) -> None:
        nonlocal now_open
        now_open += 1
        open_at_once.append(now_open)
        await answer(call)
        now_open -= 1

    async with scripted_server(script) as server:
        report = await run_async(options(server.url, workload="idle", lengths=(40, 100), requests=3))
    assert [call.num_words for call in server.streams] == [40, 100] * 3
    assert [call.body["max_tokens"] for call in server.streams] == [16] * 6
    assert set(open_at_once) == {1}
    assert {(group.group, group.ok, group.length_error) for group in report.groups} == {
        ("idle 40", 3, 0),
        ("idle 100", 3, 0),
    }
    assert set(report.figures["server"]) == {"prefill_40_tokens_per_s", "prefill_100_tokens_per_s"}


@pytest.mark.parametrize("has_tokenize", [True, False])
@pytest.mark.parametrize("api", ["chat", "completions"])
async def test_lengths_are_exact_however_the_server_lets_itself_be_asked(api: str, has_tokenize: bool) -> None:
    async with scripted_server(has_tokenize=has_tokenize) as server:
        report = await run_async(options(server.url, lengths=(77,), requests=1, api=api))
    assert [call.num_words for call in server.streams] == [77]
    assert {call.path for call in server.streams} == {"/v1/chat/completions" if api == "chat" else "/v1/completions"}
    assert report.targets[0].exact_lengths
    assert report.targets[0].model == "scripted"


async def test_a_server_that_refuses_system_messages() -> None:
    async def refuse_system(call: Call) -> bool:
        if any(message["role"] == "system" for message in call.body["messages"]):
            await call.json({"error": {"message": "System role not supported"}}, status=400)
            return True
        return False

    class Refusing(ScriptedServer):
        async def _dispatch(self, call: Call) -> None:
            if not (call.path.endswith("/chat/completions") and await refuse_system(call)):
                await super()._dispatch(call)

    server = Refusing()
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    report = await run_async(options(url, lengths=(50,), requests=2))
    listener.close()
    await server.wait_for_open(0)
    assert [call.num_words for call in server.streams if report.num_answered] == [50, 50]
    assert report.num_errors == 0


async def test_prefix_shares_the_system_prompt_within_a_pair_only() -> None:
    async with scripted_server() as server:
        report = await run_async(options(server.url, workload="prefix", requests=3, prefix_tokens=60, suffix_tokens=20))
    prompts = [call.body["messages"] for call in server.streams]
    systems = [messages[0]["content"] for messages in prompts]
    assert systems[0::2] == systems[1::2]
    assert len(set(systems)) == 3
    assert len({messages[1]["content"] for messages in prompts}) == 6
    assert {call.num_words for call in server.streams} == {80}
    assert [record.group for record in report.records] == ["cold", "warm"] * 3
    assert set(report.figures["server"]) == {"cold_ttft_ms", "warm_ttft_ms", "warm_over_cold_ratio"}


async def test_hol_sends_short_prompts_while_the_long_one_has_no_token_and_a_chat_runs() -> None:
    short_while_long: list[int] = []
    enough = asyncio.Event()
    long_running = False

    async def script(call: Call) -> None:
        nonlocal long_running
        if call.body["max_tokens"] == 500:  # the chat: one token, then it waits for its client to leave
            await call.begin()
            await call.delta(content="x")
            await asyncio.Event().wait()
        elif call.num_words == 300:
            long_running = True
            await enough.wait()
            long_running = False
            await answer(call)
        else:
            if long_running:
                short_while_long.append(call.num_words)
                if len(short_while_long) == 3:
                    enough.set()
            await answer(call)

    async with scripted_server(script) as server:
        report = await run_async(
            options(
                server.url, workload="hol", requests=3, short_tokens=30, long_tokens=300, streams=2, stream_tokens=500
            )
        )
    assert short_while_long == [30] * 3
    statuses = {group.group: (group.ok, group.stopped, group.errors) for group in report.groups}
    assert statuses == {"short idle": (3, 0, 0), "stream": (0, 2, 0), "long": (1, 0, 0), "short loaded": (3, 0, 0)}
    figures = report.figures["server"]
    assert figures["short_ratio"] == pytest.approx(figures["short_loaded_ttft_ms"] / figures["short_idle_ttft_ms"])
    assert figures["short_worst_ratio"] >= figures["short_ratio"]
    # The chats were silent from their first token to the end of the load: no gap between two tokens, but it counts.
    assert figures["stream_largest_gap_ms"] >= figures["long_ttft_ms"]


async def test_hol_starts_another_chat_when_one_ends() -> None:
    more_chats = asyncio.Event()
    num_chats = 0

    async def script(call: Call) -> None:
        nonlocal num_chats
        if call.body["max_tokens"] == 500:
            num_chats += 1
            if num_chats == 3:
                more_chats.set()
                await call.begin()
                await call.delta(content="x")
                await asyncio.Event().wait()
        elif call.num_words == 300:
            await more_chats.wait()
        await answer(call)

    async with scripted_server(script) as server:
        report = await run_async(
            options(server.url, workload="hol", requests=1, short_tokens=30, long_tokens=300, stream_tokens=500)
        )
    assert [record.status for record in by_group(report, "stream")] == ["ok", "ok", "stopped"]


async def test_poisson_is_reproducible_and_no_prompt_comes_twice() -> None:
    wanted: dict[str, Any] = {"workload": "poisson", "requests": 20, "prompt_tokens": LengthDist(20, 60), "seed": 5}
    async with scripted_server() as server:
        first = await run_async(options(server.url, **wanted))
        second = await run_async(options(server.url, **wanted))
    lengths = [[record.wanted_prompt_tokens for record in report.records] for report in (first, second)]
    assert lengths[0] == lengths[1]
    assert len(set(lengths[0])) > 5
    prompts = [prompt_of(call) for call in server.streams]
    assert len(set(prompts)) == 40


async def test_chat_sends_the_answer_back_with_the_next_turn() -> None:
    async with scripted_server() as server:
        report = await run_async(options(server.url, workload="chat", limit=4, output_tokens=LengthDist(3, 3)))
    second_turns = [call.body["messages"] for call in server.streams if len(call.body["messages"]) == 4]
    assert len(second_turns) == 4
    for messages in second_turns:
        assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
        assert messages[2]["content"] == "x x x "
    assert [(group.group, group.ok) for group in report.groups] == [("turn 1", 4), ("turn 2", 4)]
    assert "ignore_eos" not in server.streams[0].body


async def test_chat_reads_questions_and_ends_a_conversation_that_failed(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"turns": ["alpha", "beta"]}\n{"turns": ["broken", "never"]}\n')

    async def script(call: Call) -> None:
        if "broken" in prompt_of(call):
            await call.json({"error": {"message": "no"}}, status=500)
        else:
            await answer(call)

    async with scripted_server(script) as server:
        report = await run_async(options(server.url, workload="chat", limit=2, file=path))
    assert [(group.group, group.ok, group.errors) for group in report.groups] == [("turn 1", 1, 1), ("turn 2", 1, 0)]


@pytest.mark.parametrize("line", ["{", '{"turns": []}', '{"turns": [""]}', '{"turns": [1]}'])
async def test_broken_questions_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"turns": ["alpha"]}\n' + line)
    with pytest.raises(BenchError, match="row 2"):
        await run_async(options("http://127.0.0.1:9", workload="chat", file=path))


async def test_a_trace_makes_real_shared_prefixes_of_the_right_lengths(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [(1200, [1, 2, 3]), (1536, [1, 2, 4]), (600, [9, 8]), (50_000, list(range(100, 198)))]
    path.write_text(
        "\n".join(
            json.dumps({"timestamp": 0, "input_length": length, "output_length": 40, "hash_ids": ids})
            for length, ids in rows
        )
    )
    async with scripted_server() as server:
        report = await run_async(
            options(server.url, workload="trace", file=path, shrink=8, max_prompt_tokens=1000, rounds=2)
        )
    calls = sorted(server.streams[:3], key=lambda call: call.num_words)
    assert [call.num_words for call in calls] == [75, 150, 192]
    assert {call.body["max_tokens"] for call in calls} == {5}
    short, long = (" ".join(prompt_of(call).split()).replace("The ", "") for call in calls[1:])
    shared = 2 * 512 // 8
    assert short.split()[:shared] == long.split()[:shared]
    assert short.split()[shared:] != long.split()[shared : len(short.split())]
    assert report.notes == ["1 of 4 rows left out: longer than --max-prompt-tokens 1000"]
    next_round = {prompt_of(call)[:60] for call in server.streams[3:]}
    assert not next_round & {prompt_of(call)[:60] for call in calls}  # a later round is cold again


async def test_errors_are_counted_and_kept_apart_from_latencies() -> None:
    count = 0

    async def script(call: Call) -> None:
        nonlocal count
        count += 1
        if count % 2:
            await call.json({"error": {"message": f"refused {call.num_words}"}}, status=503)
        else:
            await answer(call)

    async with scripted_server(script) as server:
        report = await run_async(options(server.url, workload="poisson", requests=10, prompt_tokens=LengthDist(30, 30)))
    (group,) = report.groups
    assert (group.requests, group.ok, group.errors) == (10, 5, 5)
    assert {record.error for record in report.records if record.failed} == {"HTTP 503: refused 30"}
    assert report.num_errors == 5


async def test_a_server_that_says_not_now_has_rejected_and_not_failed() -> None:
    count = 0

    async def script(call: Call) -> None:
        nonlocal count
        count += call.stream
        if call.stream and count % 2:
            await call.json({"error": {"message": "too late", "code": "slo_miss"}}, status=429)
        else:
            await answer(call)

    async with scripted_server(script) as server:
        report = await run_async(options(server.url, workload="poisson", requests=10, prompt_tokens=LengthDist(30, 30)))
    (group,) = report.groups
    assert (group.ok, group.rejected, group.errors) == (5, 5, 0)
    assert (report.num_rejected, report.num_errors) == (5, 0)
    assert group.rejection is not None
    print_report(report, Console(file=io.StringIO()))


async def test_the_chunk_sizes_are_those_of_the_run() -> None:
    steps = {"16": 5, "64": 7, "+Inf": 7}  # cumulative, as it is in the text format; what was before the run

    async def script(call: Call) -> None:
        if call.path.endswith("completions"):
            await answer(call)
            return
        name = "headstart_step_prefill_tokens_bucket"
        await call.text("".join(f'{name}{{le="{bound}"}} {count}\n' for bound, count in steps.items()))
        steps.update({"16": 6, "64": 10, "+Inf": 12})

    async with scripted_server(script, has_metrics=True) as server:
        report = await run_async(options(server.url, workload="idle", requests=1, lengths=(30,)))
    found = [(each.above, each.up_to, each.steps) for each in report.chunks["server"]]
    assert found == [(0, 16, 1), (16, 64, 2), (64, None, 2)]
    out = io.StringIO()
    print_report(report, Console(file=out))
    assert "over 64" in out.getvalue()


async def test_two_servers_take_turns_and_give_ratios() -> None:
    order: list[str] = []

    def noting(name: str) -> Any:
        async def script(call: Call) -> None:
            order.append(name)
            await answer(call)

        return script

    async with scripted_server(noting("A")) as first, scripted_server(noting("B")) as second:
        report = await run_async(options(first.url, against=second.url, lengths=(30,), requests=2, rounds=3))
    assert order == ["A", "A", "B", "B", "B", "B", "A", "A", "A", "A", "B", "B"]
    assert (report.rounds, [target.name for target in report.targets]) == (3, ["A", "B"])
    assert {record.round for record in report.records} == {0, 1, 2}
    for ratio in report.ratios:
        assert ratio.ratio == (pytest.approx(ratio.first / ratio.second) if ratio.second else None)
    named = {(ratio.group, ratio.metric): ratio for ratio in report.ratios}
    groups = {group.target: group for group in report.groups}
    assert groups["A"].ttft is not None
    assert named["idle 30", "ttft_p50_ms"].first == groups["A"].ttft.p50
    assert named["", "prefill_30_tokens_per_s"].second == report.figures["B"]["prefill_30_tokens_per_s"]


async def test_the_ledger_check_compares_each_request() -> None:
    async def script(call: Call) -> None:
        await call.begin(Server_Timing="queue;dur=0.25, prefill;dur=0.5")
        await call.delta(content="x", finish_reason="stop")
        await call.end()

    async with scripted_server(script) as server:
        report = await run_async(options(server.url, lengths=(30,), requests=5, check_ledger=True))
    assert report.ledger is not None
    check = report.ledger["server"]
    assert (check.checked, check.missing) == (5, 0)
    assert check.median_ms == pytest.approx(sorted(record.ttft_ms or 0 for record in report.records)[2] - 0.75)
    assert report.groups[0].ledger == {"queue": 0.25, "prefill": 0.5}


async def test_an_interrupted_run_reports_what_there_is() -> None:
    hold = asyncio.Event()

    async def script(call: Call) -> None:
        if len(server.streams) > 2:
            await hold.wait()
        await answer(call)

    async with scripted_server(script) as server:
        running = asyncio.ensure_future(run_async(options(server.url, workload="poisson", requests=5)))
        await server.wait_for_streams(5)
        running.cancel()
        report = await running
        hold.set()
        await server.wait_for_open(0)  # it left no connection behind
    assert report.interrupted
    assert sorted(record.status for record in report.records) == ["interrupted"] * 3 + ["ok"] * 2


async def test_the_file_holds_everything_but_the_key(tmp_path: Path) -> None:
    async with scripted_server() as server:
        report = await run_async(options(server.url, lengths=(30,), requests=2, api_key="secret", slo_ttft_ms=1e9))
    assert server.streams[0].headers["authorization"] == "Bearer secret"
    path = tmp_path / "report.json"
    write_report(report, path)
    assert read_report(path) == report
    text = path.read_text()
    assert "secret" not in text
    assert json.loads(text)["schema"] == "headstart.bench/1"
    path.write_text(text.replace("headstart.bench/1", "headstart.bench/999"))
    with pytest.raises(BenchError, match=r"headstart\.bench/1"):
        read_report(path)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (401, {"error": {"message": "bad key"}}, "HTTP 401: bad key"),
        (200, {"data": []}, "name one with --model"),
        (200, {"data": [{"id": "m"}]}, "HTTP 401|no usage|prompt_tokens"),
    ],
)
async def test_what_keeps_a_run_from_beginning_is_one_clear_line(status: int, body: Any, message: str) -> None:
    class Broken(ScriptedServer):
        async def _dispatch(self, call: Call) -> None:
            if call.path.endswith("/tokenize"):
                await call.json({}, status=404)
            else:
                await call.json(body, status)

    server = Broken()
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    with pytest.raises(BenchError, match=message):
        await run_async(options(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"))
    listener.close()
    await server.wait_for_open(0)


async def test_no_server() -> None:
    async with scripted_server() as server:
        url = server.url
    with pytest.raises(BenchError, match="no connection"):
        await run_async(options(url))
