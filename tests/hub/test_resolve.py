"""Which meaning a model's name has, and what a wrong name is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from headstart.hub import ModelError, resolve
from headstart.hub.cache import cache_folder
from headstart.hub.hugging_face import is_hub_id


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("smollm2-135M", "did you mean 'smollm2-135m'"),
        ("smollm-135m", "did you mean 'smollm2-135m'"),
        ("qwen", "unknown model 'qwen': give a folder"),
        ("./models/mine", "./models/mine does not exist"),
        ("/nowhere/at/all", "/nowhere/at/all does not exist"),
        ("mine.gguf", "mine.gguf does not exist"),
        ("a/b/c", "a/b/c does not exist"),
        ("x" * 5000, "no usable path"),
        ("a\0b", "no usable path|unknown model"),
    ],
)
def test_a_name_that_means_nothing_gets_one_clear_line(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        resolve(name)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_a_folder_and_a_gguf_file_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF....")
    (tmp_path / "readme.txt").write_text("", encoding="utf-8")
    assert resolve(str(tmp_path)).weights == (tmp_path / "m.gguf",)
    assert resolve(str(tmp_path / "m.gguf")).name == str(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"neither a folder nor a \.gguf file"):
        resolve(str(tmp_path / "readme.txt"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/m.gguf").weights == (tmp_path / "m.gguf",)


def test_what_may_be_a_hub_id() -> None:
    assert is_hub_id("Qwen/Qwen3-0.6B")
    assert is_hub_id("org/name/sub/file-Q4_K_M.gguf")
    assert not is_hub_id("name")
    assert not is_hub_id("a/b/c")
    assert not is_hub_id("or g/name")


def test_the_cache_lies_where_the_user_wants_it() -> None:
    assert cache_folder({"HEADSTART_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/headstart")
    assert cache_folder({}) == Path.home() / ".cache" / "headstart"
