"""The header of a safetensors file against the reference implementation, and damage of every kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from headstart.hub import ModelError
from headstart.hub.safetensors_header import TensorEntry, safetensors_header
from tests.fixtures.stories import shared_data


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | changes


def test_a_real_file_reads_as_the_reference_reads_it() -> None:
    path = shared_data("models", "stories260K-hf", "model.safetensors")
    found = safetensors_header(path)
    with safe_open(path, framework="np") as reference:
        views = {name: reference.get_slice(name) for name in reference.keys()}  # noqa: SIM118
        assert {name: (each.shape, each.dtype) for name, each in found.items()} == {
            name: (tuple(view.get_shape()), view.get_dtype()) for name, view in views.items()
        }


def test_entries_and_metadata(tmp_path: Path) -> None:
    path = write(tmp_path / "m", {"__metadata__": {"format": "pt"}, "a": entry()}, bytes(24))
    assert safetensors_header(path) == {"a": TensorEntry("F32", (2, 3), 24)}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"not json", b"", "no JSON"),
        (b"\xff\xfe{}", b"", "no JSON"),
        (b"[" * 100_000, b"", "no JSON"),
        ([], b"", "no JSON object"),
        ({"a": entry()}, bytes(23), "end at byte .* of .*truncated"),
        ({"a": entry()}, bytes(25), "end at byte"),
        ({"a": 3}, b"", "tensor a is no object"),
        ({"a": entry(shape=None)}, bytes(24), "tensor a is incomplete"),
        ({"a": entry(shape=[-2, -3])}, bytes(24), "tensor a is incomplete"),
        ({"a": entry(data_offsets=[0])}, bytes(24), "tensor a is incomplete"),
        ({"a": entry(data_offsets=[24, 0])}, bytes(24), "tensor a has -24 bytes"),
        ({"a": entry(shape=[2, 4])}, bytes(24), "tensor a has 24 bytes for F32"),
    ],
)
def test_damage_is_one_line(header: Any, data: bytes, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", header, data)
    with pytest.raises(ModelError, match=message) as caught:
        safetensors_header(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\1\0", (1 << 60).to_bytes(8, "little") + b"{}"])
def test_a_file_that_ends_inside_its_header(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="header is incomplete"):
        safetensors_header(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot read"):
        safetensors_header(tmp_path / "absent")
