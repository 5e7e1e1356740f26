"""Models on the Hugging Face hub, through `huggingface_hub` with its own cache, token and configuration.

Owns which files of a repository are needed. `huggingface_hub` is only loaded when a hub id is really asked for.
"""

from __future__ import annotations

import re
from pathlib import Path

import huggingface_hub  # loads its parts lazily: this import is light

from headstart.hub.files import ModelError

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_FILE = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)/(?P<file>.+\.gguf)")
_NEEDED = ["*.json", "*.jinja", "*.safetensors", "tokenizer.model"]
_NOT_NEEDED = ["*/*"]  # subfolders: other formats of the same weights


def is_hub_id(model: str) -> bool:
    """`org/name`, or `org/name/file.gguf` for one GGUF file of a repository."""
    return bool(_REPOSITORY.fullmatch(model) or _FILE.fullmatch(model))


def fetch_from_hub(model: str) -> Path:
    """The local folder of `org/name`, or the local path of `org/name/file.gguf`; downloads what is missing.

    Raises `ModelError` where the repository does not exist, is gated, or cannot be reached and is not in the cache.
    """
    one_file = _FILE.fullmatch(model)
    try:
        if one_file is None:
            return Path(huggingface_hub.snapshot_download(model, allow_patterns=_NEEDED, ignore_patterns=_NOT_NEEDED))
        folder = huggingface_hub.snapshot_download(one_file["repository"], allow_patterns=[one_file["file"]])
    except Exception as error:  # the client, httpx and the file system each have their own; all mean: not here
        raise ModelError(_explain(model, error)) from None
    path = Path(folder) / one_file["file"]
    if not path.is_file():
        raise ModelError(f"the hub's {one_file['repository']} has no file {one_file['file']}")
    return path


def _explain(model: str, error: Exception) -> str:
    errors = huggingface_hub.errors
    if isinstance(error, errors.GatedRepoError):
        return f"{model} is gated: accept its terms on its page, then log in with `hf auth login` or set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{model} is neither a file here nor a repository on the hub (a private one needs HF_TOKEN)"
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled | ConnectionError):
        return (
            f"{model} is not a file here, and the hub cannot be reached: check the network (HF_ENDPOINT names "
            "a mirror), or name a local folder or .gguf file"
        )
    detail = " ".join(str(error).split())[:200] or type(error).__name__
    return f"cannot fetch {model} from the hub: {detail}"
