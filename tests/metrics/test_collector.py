"""From outputs to observations, checked through the exposition."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headstart.core.accuracy import Accuracy
from headstart.core.connector import TierState
from headstart.core.request import FinishReason
from headstart.core.stats import PREFILL_STEP_TOKENS, CoreStats
from headstart.core.step import RequestOutput
from headstart.metrics.collector import Collector, EngineView
from headstart.metrics.ledger import PARTS

STATS = CoreStats(1, 2, 30, 10, 64, 13, 5, 600, 70, 80, 9, 11, 12, (0, 3, 1, *[0] * (len(PREFILL_STEP_TOKENS) - 2)))


def collector(stats: CoreStats | None = STATS, up: bool = True) -> Collector:
    return Collector(lambda: EngineView(up, stats), version="1.2", model="m")


def samples(found: Collector) -> dict[Any, float]:
    text = found.exposition().decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def output(time: float, count: int, **fields: Any) -> RequestOutput:
    return RequestOutput("r", token_ids=(0,) * min(count, 1), num_output_tokens=count, time=time, **fields)


def test_a_request_from_first_to_last_token() -> None:
    found = collector()
    track = found.track(received=9.0, num_prompt_tokens=100)
    track.observe(output(10.0, 1, ledger=(("admit", 0.1), ("queue", 0.4), ("prefill", 0.5), ("sample", 0.0))))
    track.observe(output(10.2, 2))
    track.observe(output(10.8, 5))  # three tokens at once
    track.observe(output(11.0, 6, finish_reason=FinishReason.STOP))
    track.close()
    values = samples(found)
    assert values["headstart_inter_token_latency_seconds_count",] == 5
    assert values["headstart_inter_token_latency_seconds_sum",] == pytest.approx(1.0)
    assert values["headstart_inter_token_latency_seconds_bucket", "0.25"] == 5
    assert values["headstart_inter_token_latency_seconds_bucket", "0.15"] == 0
    assert values["headstart_request_time_per_output_token_seconds_sum",] == pytest.approx(0.2)
    assert values["headstart_e2e_request_latency_seconds_sum",] == pytest.approx(2.0)
    assert values["headstart_request_queue_time_seconds_sum",] == pytest.approx(0.5)
    assert values["headstart_request_prompt_tokens_sum",] == 100
    assert values["headstart_request_generation_tokens_sum",] == 6
    assert values["headstart_requests_finished_total", "stop"] == 1
    assert ("headstart_requests_finished_total", "abort") not in values


def test_how_a_request_ended_is_counted_once() -> None:
    found = collector()
    track = found.track(0.0, 1)
    track.observe(output(1.0, 1))
    track.close()
    track.close("stop")
    stopped = found.track(0.0, 1)  # by a stop string: the engine did not know
    stopped.observe(output(1.0, 1))
    stopped.close("stop")
    values = samples(found)
    assert values["headstart_requests_finished_total", "abort"] == 1
    assert values["headstart_requests_finished_total", "stop"] == 1
    assert values["headstart_e2e_request_latency_seconds_count",] == 1


def test_the_ledger_by_part_and_in_sum() -> None:
    found = collector()
    found.first_token(tuple((part, 0.01 * (index + 1)) for index, part in enumerate(PARTS)))
    values = samples(found)
    assert values["headstart_time_to_first_token_seconds_sum",] == pytest.approx(0.55)
    for index, part in enumerate(PARTS):
        assert values["headstart_ttft_part_seconds_sum", part] == pytest.approx(0.01 * (index + 1))


def test_the_engine_in_numbers() -> None:
    values = samples(collector())
    assert values["headstart_engine_up",] == 1
    assert values["headstart_build_info", "1.2", "m"] == 1
    assert values["headstart_num_requests_running",] == STATS.num_running
    assert values["headstart_num_requests_waiting",] == STATS.num_waiting
    assert values["headstart_kv_cache_usage_ratio",] == pytest.approx(34 / 64)
    kinds = {"prompt_computed": 600, "prompt_cached": 70, "generated": 80}
    assert {kind: values["headstart_tokens_total", kind] for kind in kinds} == kinds
    assert values["headstart_prefix_cache_evicted_blocks_total",] == STATS.evicted_blocks
    assert values["headstart_preemptions_total",] == STATS.preemptions
    assert values["headstart_aborts_total",] == 0, "the engine also takes requests back whose text is complete"


def test_step_predictions_as_the_engine_counted_them() -> None:
    accuracy = Accuracy()
    for predicted in (0.9, 1.05, 1.05, 20.0):
        accuracy.observe(predicted, 1.0)
    found = dataclasses.replace(STATS, step_ratios=accuracy.counts, step_ratios_sum=accuracy.total)
    for stats, count in ((found, 4), (STATS, 0)):
        values = samples(collector(stats))
        name = "headstart_step_predicted_over_real_ratio"
        assert values[f"{name}_count",] == values[f"{name}_bucket", "+Inf"] == count
    values = samples(collector(found))
    assert values[f"{name}_sum",] == pytest.approx(23.0)
    assert values[f"{name}_bucket", "0.94"] == 1
    assert values[f"{name}_bucket", "1.06"] == values[f"{name}_bucket", "10"] == 3


def test_the_engine_may_have_no_numbers_yet() -> None:
    values = samples(collector(stats=None, up=False))
    assert values["headstart_engine_up",] == 0
    assert ("headstart_num_requests_running",) not in values


def test_stats_are_asked_for_at_each_reading() -> None:
    now = [STATS]
    found = Collector(lambda: EngineView(True, now[0]), version="1", model="m")
    now[0] = dataclasses.replace(STATS, num_running=7)
    assert samples(found)["headstart_num_requests_running",] == 7


def test_tiers_one_by_one_and_none_where_there_is_none() -> None:
    tiers = (TierState("ram", True, 3, 300), TierState("disk", False, 0, 900))
    values = samples(collector(dataclasses.replace(STATS, tiers=tiers, tier_dropped_blocks=7)))
    kinds = ("up", "blocks", "bytes")
    assert [values[f"headstart_kv_tier_{kind}", "ram"] for kind in kinds] == [1, 3, 300]
    assert [values[f"headstart_kv_tier_{kind}", "disk"] for kind in kinds] == [0, 0, 900]
    assert values["headstart_kv_tier_dropped_blocks_total",] == 7
    assert not [name for name, *_ in samples(collector()) if "tier" in name]


def test_the_chunk_sizes_are_a_histogram() -> None:
    values = samples(collector())
    name = "headstart_step_prefill_tokens"
    assert values[f"{name}_bucket", "16"] == 0
    assert values[f"{name}_bucket", "32"] == 3
    assert values[f"{name}_count",] == 4
    assert values[f"{name}_sum",] == STATS.prompt_tokens_computed
