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
_MOST_FILES = 1_000


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

    def path(self, key: CostKey) -> Path:
        return self._folder / key.filename

    def load(self, key: CostKey) -> Coefficients | None:
        """What was kept for `key`. A damaged file, or another version's, is left out, with a warning that names it."""
        path = self.path(key)
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

    def latest(self, model: str) -> Coefficients | None:
        """What was kept last for this model, whatever the settings; None if nothing was."""
        try:
            paths = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        except OSError:
            return None
        for path in paths[:_MOST_FILES]:
            try:
                content = json.loads(path.read_bytes())
                if content["version"] == _VERSION and content["key"]["model"].rpartition(" ")[0] == model:
                    return Coefficients(**content["coefficients"])
            except (OSError, ValueError, TypeError, KeyError, AttributeError):
                continue  # a server that needs it says what is wrong
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
                os.replace(temporary, self.path(key))
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError:
            return False
        return True


class KeptCostModel(FittedCostModel):
    """One that begins where the last run ended, and is kept every few hundred steps."""

    _DOUBT = 0.1  # of what was learned
    _LEAST = 0.1  # of the prior: learning goes on by multiples, and those of nothing are nothing

    def __init__(self, prior: Coefficients, store: CostStore, key: CostKey) -> None:
        known = store.load(key)
        super().__init__(prior if known is None else known, doubt=1.0 if known is None else self._DOUBT)
        self.was_known = known is not None
        self._has_news = False
        self._prior = prior
        self._store = store
        self._key = key

    @property
    def path(self) -> Path:
        """The file that it is kept in."""
        return self._store.path(self._key)

    def take_over(self, fitted: Coefficients) -> None:
        """Believe what was fitted to steps that ran."""
        pairs = zip(fitted.values(), self._prior.values(), strict=True)
        self.begin(Coefficients(*(max(value, self._LEAST * least) for value, least in pairs)), self._DOUBT)
        self._has_news = True

    def observe(self, work: StepWork, seconds: float) -> None:
        super().observe(work, seconds)
        if self.num_observed and self.num_observed % _SAVE_EVERY == 0:
            self.save()

    def save(self) -> bool:
        """False if there is nothing to keep, or it cannot be kept."""
        if not self.num_observed and not self._has_news:
            return False
        return self._store.save(self._key, self.coefficients)
