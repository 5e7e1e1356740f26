"""The user's cache folder and what may be trusted in it. Owns the place, the lock and the proof that a file is whole.

Knows nothing of where files come from.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from headstart.hub.files import ModelError, Progress

_CHUNK = 1 << 20  # bytes hashed at a time
_STAMP_SUFFIX = ".verified"


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """$HEADSTART_CACHE, else $XDG_CACHE_HOME/headstart, else ~/.cache/headstart. Need not exist yet."""
    if own := environ.get("HEADSTART_CACHE"):
        return Path(own).expanduser()
    if shared := environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "headstart"
    try:
        return Path.home() / ".cache" / "headstart"
    except RuntimeError:
        raise ModelError("no home folder is known: set HEADSTART_CACHE to a folder for models") from None


def is_whole(path: Path, size: int, sha256: str, *, progress: Progress | None = None) -> bool:
    """Whether `path` holds what it should. The hash is computed once; then size and time of change vouch for it."""
    try:
        stat = path.stat()
    except OSError:
        return False
    if stat.st_size != size:
        return False
    proof = {"size": size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256}
    if _stamp(path) == proof:
        return True
    if sha256_of(path, size, progress=progress) != sha256:
        return False
    _write_stamp(path, proof)
    return True


def sha256_of(path: Path, size: int, *, progress: Progress | None = None) -> str:
    """The file's SHA-256 in hex. Raises `ModelError` if it cannot be read."""
    digest = hashlib.sha256()
    done = 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                done += len(chunk)
                if progress is not None:
                    progress("verify", done, size)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    return digest.hexdigest()


def _stamp(path: Path) -> object:
    try:
        return json.loads(_stamp_path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _write_stamp(path: Path, proof: Mapping[str, object]) -> None:
    stamp = _stamp_path(path)
    part = stamp.with_name(f"{stamp.name}.{os.getpid()}")
    try:
        part.write_text(json.dumps(proof), encoding="utf-8")
        part.replace(stamp)
    except OSError:  # a read-only cache: the hash is computed again at the next start
        part.unlink(missing_ok=True)


def _stamp_path(path: Path) -> Path:
    return path.with_name(path.name + _STAMP_SUFFIX)
