"""SLOs asked for by field and header, whose requests are, and what a refusal and an estimate say, over HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest

from headstart.config import SchedulerConfig, ServerConfig
from headstart.core.errors import SloMiss
from tests.server.conftest import Start
from tests.server.harness import error_of
from tests.server.real import serving_stories

TEXT = "/v1/completions"


@pytest.mark.parametrize(
    ("field", "header", "expected"),
    [(None, None, None), (250, None, 0.25), (None, "1500", 1.5), (100, "1500", 0.1)],
)
def test_an_slo_comes_by_field_or_header(
    start: Start, field: float | None, header: str | None, expected: float | None
) -> None:
    running, engine = start()
    headers = {} if header is None else {"x-slo-ttft-ms": header}
    assert running.client.post(TEXT, json={"prompt": "x", "slo_ttft_ms": field}, headers=headers).status_code == 200
    assert engine.requests[0].slo_ttft == expected


@pytest.mark.parametrize("value", ["0", "-5", "nan", "soon", "1e99"])
def test_an_slo_that_is_none_is_named(start: Start, value: str) -> None:
    running, engine = start()
    response = running.client.post(TEXT, json={"prompt": "x"}, headers={"x-slo-ttft-ms": value})
    assert response.status_code == 400
    assert error_of(response)["param"] == "x-slo-ttft-ms"
    if value in ("0", "-5"):
        response = running.client.post(TEXT, json={"prompt": "x", "slo_ttft_ms": float(value)})
        assert (response.status_code, error_of(response)["param"]) == (400, "slo_ttft_ms")
    assert not engine.requests


def test_a_miss_is_429_with_the_prediction_and_when_to_try_again(start: Start) -> None:
    running, engine = start()
    engine.refuse = SloMiss(2.5, 1.0, 1.2)
    response = running.client.post(TEXT, json={"prompt": "x", "slo_ttft_ms": 1000})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "2"
    assert response.headers["x-headstart-predicted-ttft-ms"] == "2500.0"
    assert error_of(response)["code"] == "slo_miss"
    assert 'headstart_slo_requests_total{outcome="rejected"} 1' in running.client.get("/metrics").text


def test_a_tenant_is_a_key(start: Start) -> None:
    running, engine = start(server=ServerConfig(api_keys=("one", "two")))
    for key in ("two", "one"):
        assert (
            running.client.post(TEXT, json={"prompt": "x"}, headers={"authorization": f"Bearer {key}"}).status_code
            == 200
        )
    first, second = (request.tenant for request in engine.requests)
    assert first != second
    assert "one" not in first + second


def test_a_real_engine_predicts_and_estimates(tmp_path: Path) -> None:
    with serving_stories(tmp_path / "stories", SchedulerConfig()) as served:
        asked = {"prompt": "Once upon a time there was a little cat. " * 6, "slo_ttft_ms": 60_000, "max_tokens": 4}
        cold = served.running.client.post("/v1/ttft/estimate", json=asked).json()
        assert cold["predicted_ttft_ms"] > 0
        assert cold["meets_slo"] is True
        assert (cold["cached_tokens"], cold["requests_ahead"]) == (0, 0)
        answer = served.running.client.post(TEXT, json=asked)
        assert float(answer.headers["x-headstart-predicted-ttft-ms"]) > 0
        assert answer.json()["usage"]["predicted_ttft_ms"] > 0
        warm = served.running.client.post("/v1/ttft/estimate", json=asked).json()
        assert warm["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]
        assert warm["cached_tokens"] > 0
        chat = served.running.client.post(
            "/v1/ttft/estimate", json={"messages": [{"role": "user", "content": "Hello"}]}
        )
        assert chat.status_code == 200, chat.text
        assert served.running.client.post("/v1/ttft/estimate", json={"prompt": "x" * 9_000}).status_code == 400
        assert 'headstart_slo_requests_total{outcome="met"} 1' in served.running.client.get("/metrics").text
