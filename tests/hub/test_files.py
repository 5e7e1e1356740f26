"""Folders and GGUF files as models: what is found, and what is said when something is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headstart.hub import ModelError, files_of_folder, files_of_gguf, read_json


def folder_with(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).write_text("{}", encoding="utf-8")
    return root


def test_a_hugging_face_folder_lists_what_it_has(tmp_path: Path) -> None:
    folder_with(tmp_path, "config.json", "model.safetensors", "tokenizer.json", "generation_config.json")
    files = files_of_folder(tmp_path, name="mine")
    assert files.name == "mine"
    assert files.format == "safetensors"
    assert files.weights == (tmp_path / "model.safetensors",)
    assert files.config == tmp_path / "config.json"
    assert files.tokenizer == tmp_path / "tokenizer.json"
    assert files.generation_config == tmp_path / "generation_config.json"
    assert files.tokenizer_config is None
    assert files.chat_template is None


def write_index(root: Path, *shards: str) -> None:
    weight_map = {f"tensor.{position}": shard for position, shard in enumerate(shards)}
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


def test_shards_come_from_the_index_and_nothing_else(tmp_path: Path) -> None:
    folder_with(tmp_path, "config.json", "b.safetensors", "a.safetensors", "consolidated.safetensors")
    write_index(tmp_path, "b.safetensors", "a.safetensors", "b.safetensors")
    assert files_of_folder(tmp_path).weights == (tmp_path / "a.safetensors", tmp_path / "b.safetensors")


def test_shards_without_an_index_are_all_taken(tmp_path: Path) -> None:
    folder_with(tmp_path, "config.json", "b.safetensors", "a.safetensors")
    assert [path.name for path in files_of_folder(tmp_path).weights] == ["a.safetensors", "b.safetensors"]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder_with(tmp_path, "config.json", "a.safetensors")
    write_index(tmp_path, "a.safetensors", "b.safetensors", "c.safetensors")
    with pytest.raises(ModelError, match=r"lacks b\.safetensors and 1 more.*finish the download"):
        files_of_folder(tmp_path)


def test_a_shard_outside_the_folder_is_refused(tmp_path: Path) -> None:
    folder_with(tmp_path, "config.json")
    write_index(tmp_path, "../a.safetensors")
    with pytest.raises(ModelError, match="outside its folder"):
        files_of_folder(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": []}'])
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    folder_with(tmp_path, "config.json", "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match=r"index\.json is damaged"):
        files_of_folder(tmp_path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "holds no model"),
        (("config.json",), "config.json but no .safetensors"),
        (("a.safetensors",), "no config.json"),
        (("config.json", "pytorch_model.bin"), "convert them to safetensors"),
    ],
)
def test_an_incomplete_folder_says_what_is_missing(tmp_path: Path, names: tuple[str, ...], message: str) -> None:
    folder_with(tmp_path, *names)
    with pytest.raises(ModelError, match=message) as error:
        files_of_folder(tmp_path)
    assert "\n" not in str(error.value)


def test_a_folder_with_one_gguf_is_that_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF....")
    files = files_of_folder(tmp_path)
    assert files.format == "gguf"
    assert files.weights == (tmp_path / "model.gguf",)
    assert files.tokenizer is None


def test_a_folder_with_several_ggufs_asks_which(tmp_path: Path) -> None:
    for name in ("q4.gguf", "q8.gguf"):
        (tmp_path / name).write_bytes(b"GGUF....")
    with pytest.raises(ModelError, match=r"2 \.gguf files \(q4\.gguf, q8\.gguf\): name the one"):
        files_of_folder(tmp_path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"<html>404</html>")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        files_of_gguf(path)
    with pytest.raises(ModelError, match="cannot read"):
        files_of_gguf(tmp_path / "absent.gguf")


def test_json_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"config\.json is damaged"):
        read_json(path)
    path.write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(ModelError, match=r"config\.json is damaged"):
        read_json(path)
    with pytest.raises(ModelError, match="cannot read"):
        read_json(tmp_path / "absent.json")
