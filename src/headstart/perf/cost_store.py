"""What was learned of a model on a machine, kept from one run to the next: one small file each in the cache folder."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from headstart.core.cost import StepWork
from headstart.perf.cost_model import Coefficients, FittedCostModel

logger = logging.getLogger(__name__)

_VERSION = 1
_SAVE_EVERY = 500  # steps


@dataclass(frozen=True, slots=True)
class CostKey:
    """All that step times depend on, in words."""

    model: str
    device: str
    formats: str
    block_size: int
    threads: int

    @property
    def filename(self) -> str:
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return f"{digest[:32]}.json"


class CostStore:
    """The files of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, key: CostKey) -> Coefficients | None:
        """What was kept for `key`. A damaged file, or another version's, is left out, with a warning that names it."""
        path = self._folder / key.filename
        try:
            content = json.loads(path.read_bytes())
            if content["version"] != _VERSION or content["key"] != asdict(key):
                return None
            return Coefficients(**content["coefficients"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.warning("%s cannot be used and is left out (%s): costs are learned anew", path, error)
            return None

    def save(self, key: CostKey, coefficients: Coefficients) -> bool:
        """Whole or not at all; False, with nothing said, where the folder cannot be written: it is only a cache."""
        content = {"version": _VERSION, "key": asdict(key), "coefficients": asdict(coefficients)}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            fd, temporary = tempfile.mkstemp(dir=self._folder, prefix=".costs-")
            try:
                with os.fdopen(fd, "w", encoding="utf-8") as file:
                    json.dump(content, file, indent=1)
                os.replace(temporary, self._folder / key.filename)
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError:
            return False
        return True


class KeptCostModel(FittedCostModel):
    """One that begins where the last run ended, and is kept every few hundred steps."""

    def __init__(self, prior: Coefficients, store: CostStore, key: CostKey) -> None:
        known = store.load(key)
        super().__init__(prior if known is None else known, doubt=1.0 if known is None else 0.1)
        self.was_known = known is not None
        self._store = store
        self._key = key

    def observe(self, work: StepWork, seconds: float) -> None:
        super().observe(work, seconds)
        if self.num_observed and self.num_observed % _SAVE_EVERY == 0:
            self.save()

    def save(self) -> None:
        if self.num_observed:
            self._store.save(self._key, self.coefficients)
