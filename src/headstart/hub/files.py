"""What a resolved model is: which files, in which format. Owns the way from a folder or a GGUF file to `ModelFiles`.

It must not know how files are fetched (`resolve`), nor what is inside them (`gguf_reader`, text, perf, models).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

Format = Literal["safetensors", "gguf"]

GGUF_MAGIC = b"GGUF"


class ModelError(ValueError):
    """A model that cannot be served. The message is one line: which file or name, what is wrong, what to do."""


class Progress(Protocol):
    """Told how far a long stage is, e.g. `progress("download", 1024, 4096)`. Any thread may call it; it never raises.

    `done` and `total` count bytes (downloads, hashing, weights read) or items; `total` is None where it is unknown.
    A stage is over when `done == total`.
    """

    def __call__(self, stage: str, done: int, total: int | None, /) -> None: ...


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of one model on this machine. Every path exists when this is made; what is absent is None.

    For GGUF, `weights` is the one file, which holds configuration, tokenizer and chat template too; the rest is None.
    """

    name: str  # as the user wrote it
    root: Path
    format: Format
    weights: tuple[Path, ...]
    config: Path | None = None
    tokenizer: Path | None = None  # tokenizer.json
    tokenizer_config: Path | None = None
    generation_config: Path | None = None
    chat_template: Path | None = None  # chat_template.jinja


def files_of_gguf(path: Path, *, name: str | None = None) -> ModelFiles:
    """The model in one `.gguf` file. Raises `ModelError` if it is no readable GGUF file."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    if magic != GGUF_MAGIC:
        raise ModelError(f"{path} is not a GGUF file (it starts with {magic!r}, not {GGUF_MAGIC!r}): download it again")
    return ModelFiles(name=name or str(path), root=path.parent, format="gguf", weights=(path,))


def files_of_folder(root: Path, *, name: str | None = None) -> ModelFiles:
    """The model in a folder: Hugging Face layout, or one `.gguf` file. Raises `ModelError` saying what is missing."""
    name = name or str(root)
    config = _existing(root, "config.json")
    weights = _safetensors(root) if config else ()
    if not weights:
        ggufs = sorted(path for path in root.glob("*.gguf") if path.is_file())
        if len(ggufs) > 1:
            names = ", ".join(path.name for path in ggufs[:4])
            raise ModelError(f"{root} holds {len(ggufs)} .gguf files ({names}): name the one to serve")
        if ggufs:
            return files_of_gguf(ggufs[0], name=name)
        raise ModelError(_why_no_model(root, config))
    return ModelFiles(
        name=name,
        root=root,
        format="safetensors",
        weights=weights,
        config=config,
        tokenizer=_existing(root, "tokenizer.json"),
        tokenizer_config=_existing(root, "tokenizer_config.json"),
        generation_config=_existing(root, "generation_config.json"),
        chat_template=_existing(root, "chat_template.jinja"),
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model's file. Raises `ModelError` for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is damaged: {error}; download it again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is damaged: it holds no JSON object; download it again")
    return value


def _existing(root: Path, filename: str) -> Path | None:
    path = root / filename
    return path if path.is_file() else None


def _safetensors(root: Path) -> tuple[Path, ...]:
    """The shards that the index names, else model.safetensors, else every .safetensors file. () if there are none."""
    index = root / "model.safetensors.index.json"
    if index.is_file():
        return _shards(root, index)
    single = root / "model.safetensors"
    if single.is_file():
        return (single,)
    return tuple(sorted(path for path in root.glob("*.safetensors") if path.is_file()))


def _shards(root: Path, index: Path) -> tuple[Path, ...]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise ModelError(f"{index} is damaged: no weight_map; download it again")
    shards = sorted(set(weight_map.values()))
    if any(os.path.basename(shard) != shard for shard in shards):
        raise ModelError(f"{index} names a shard outside its folder: do not trust this model")
    missing = [shard for shard in shards if not (root / shard).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{root} lacks {missing[0]}{more}, which {index.name} names: finish the download")
    return tuple(root / shard for shard in shards)


def _why_no_model(root: Path, config: Path | None) -> str:
    if any(root.glob("*.bin")) or any(root.glob("*.pth")):
        return f"{root} holds weights in a pickle format only, which is not read: convert them to safetensors"
    if config is None and any(root.glob("*.safetensors")):
        return f"{root} has safetensors files but no config.json: add the model's config.json"
    if config is not None:
        return f"{root} has a config.json but no .safetensors or .gguf file: finish the download"
    return f"{root} holds no model: expected config.json with .safetensors files, or one .gguf file"
