"""What a model's generation_config.json says about sampling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headstart.hub import ModelError, ModelFiles
from headstart.hub.generation_config import SamplingDefaults, read_sampling_defaults


def files(tmp_path: Path, content: dict[str, Any] | None) -> ModelFiles:
    path = tmp_path / "generation_config.json"
    if content is None:
        return ModelFiles("m", tmp_path, "safetensors", ())
    path.write_text(json.dumps(content))
    return ModelFiles("m", tmp_path, "safetensors", (), generation_config=path)


def test_what_it_names_is_taken(tmp_path: Path) -> None:
    content = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": [1], "min_p": None}
    defaults = read_sampling_defaults(files(tmp_path, content))
    assert defaults == SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20)
    assert defaults.describe() == "temperature 0.6, top_p 0.95, top_k 20"
    assert read_sampling_defaults(files(tmp_path, {"top_k": -1, "repetition_penalty": 1.05})).describe() == (
        "repetition_penalty 1.05"
    )


@pytest.mark.parametrize("content", [None, {}, {"temperature": None}])
def test_without_it_the_api_decides(content: dict[str, Any] | None, tmp_path: Path) -> None:
    defaults = read_sampling_defaults(files(tmp_path, content))
    assert defaults == SamplingDefaults()
    assert defaults.describe() == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"temperature": 3}, "temperature is 3"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": "0.9"}, "top_p is '0.9'"),
        ({"top_k": 1.5}, r"top_k is 1\.5"),
        ({"top_k": True}, "top_k is True"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
    ],
)
def test_what_no_request_may_ask_for_is_refused(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read_sampling_defaults(files(tmp_path, content))
    assert "--generation-config none" in str(caught.value)
