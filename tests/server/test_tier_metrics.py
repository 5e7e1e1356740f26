"""What `/metrics` says of a KV tier: what it holds, and that it failed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from headstart.config import SchedulerConfig
from tests.server.real import Served, serving_stories

Numbers = dict[str, float]
BLOCK_BYTES = 16 * 1280  # of 16 tokens


def tier(served: Served) -> Numbers:
    text = served.running.client.get("/metrics").text
    found = {
        sample.name.removeprefix("headstart_kv_tier_"): (sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "_kv_tier_" in sample.name
    }
    assert found.pop("dropped_blocks_total") == ({}, 0)
    assert all(labels == {"tier": "disk"} for labels, _ in found.values())
    return {name: value for name, (_, value) in found.items()}


def until(served: Served, holds: Callable[[Numbers], bool]) -> Numbers:
    """Blocks are written behind the step that gave them up."""
    deadline = time.monotonic() + 20
    while not holds(numbers := tier(served)):
        assert time.monotonic() < deadline, numbers
    return numbers


def complete(served: Served, seed: int) -> None:
    """A prompt of 30 blocks; the pool holds 51."""
    prompt = [(seed * 7919 + index * index * 31 + index * 17) % 500 + 3 for index in range(480)]
    body = {"model": "stories", "prompt": prompt, "max_tokens": 1}
    assert served.running.client.post("/v1/completions", json=body).status_code == 200


def test_a_tier_fills_and_fails(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with serving_stories(tmp_path / "model", SchedulerConfig(), kv_cache_memory=1 << 20, kv_disk=disk) as served:
        assert tier(served) == {"up": 1, "blocks": 0, "bytes": 0}
        complete(served, 1)
        complete(served, 2)
        evicted = served.stats().evicted_blocks
        assert evicted
        numbers = until(served, lambda numbers: numbers["blocks"] == evicted)
        assert numbers["up"] == 1
        assert numbers["bytes"] == sum(path.stat().st_size for path in disk.glob("*.kvseg")) > evicted * BLOCK_BYTES
    shutil.rmtree(disk)
    with serving_stories(tmp_path / "again", SchedulerConfig(), kv_cache_memory=1 << 20, kv_disk=disk) as served:
        shutil.rmtree(disk)  # no segment can be made there any more
        complete(served, 1)
        complete(served, 2)
        assert until(served, lambda numbers: numbers["up"] == 0) == {"up": 0, "blocks": 0, "bytes": 0}
        complete(served, 1)
