"""A source whose matrices come in the formats that will be computed with: kept, quantized, or made floats.

Owns the way through the cache of quantized matrices. What is to be done is decided in `quant.settle`; must not know
layers or how weights are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from headstart.hub import ModelError, ModelFiles
from headstart.models.sources import WeightSource
from headstart.ops.formats import QuantizedWeight, WeightFormat
from headstart.perf.model_spec import ModelSpec
from headstart.perf.tensors import expected_tensors
from headstart.quant.cache import QuantizedCache, cache_key
from headstart.quant.method import METHODS, QuantizationError
from headstart.quant.settle import SettledQuantization


class QuantizingSource:
    """Implements `WeightSource` over another one."""

    def __init__(
        self, source: WeightSource, settled: SettledQuantization, where: str, cache: QuantizedCache | None = None
    ) -> None:
        self._source = source
        self._kept = {name for name, kind in source.formats.items() if kind in settled.keep}
        self._settled = settled
        self._where = where
        self._cache = cache

    @property
    def formats(self) -> Mapping[str, WeightFormat]:
        return self._source.formats

    def num_bytes(self, name: str) -> int:
        return self._source.num_bytes(name)

    def read(self, name: str) -> Tensor:
        return self._source.read(name)

    def read_matrix(self, name: str) -> Tensor | QuantizedWeight:
        """The matrix `[N, K]`. Raises `ModelError`, also for values that its format cannot hold."""
        if not self._is_made(name):
            return self._source.read_matrix(name) if name in self._kept else self._source.read(name)
        if self._cache is not None and (cached := self._cache.read(name)) is not None:
            return cached
        weight = self._make(name)
        if self._cache is not None:
            self._cache.add(name, weight)
        return weight

    def is_rounded(self, name: str) -> bool:
        return self._is_made(name)

    def rope_factors(self) -> Tensor | None:
        return self._source.rope_factors()

    def _is_made(self, name: str) -> bool:
        """Whether there is work to be kept for the next start."""
        return self._source.is_rounded(name) if name in self._kept else self._settled.method is not None

    def _make(self, name: str) -> QuantizedWeight:
        if name in self._kept:
            weight = self._source.read_matrix(name)
            assert isinstance(weight, QuantizedWeight), name
            return weight
        assert self._settled.method is not None
        try:
            return self._settled.method.quantize(self._source.read(name))
        except QuantizationError as error:
            raise ModelError(f"{self._where}: tensor {name} {error}") from None


@contextmanager
def quantizing_source(
    source: WeightSource, settled: SettledQuantization, files: ModelFiles, spec: ModelSpec
) -> Iterator[WeightSource]:
    """The source to load from. What had to be quantized is kept on disk if the block ends without an error."""
    bare = QuantizingSource(source, settled, files.name)
    names = [name for name, shape in expected_tensors(spec).items() if len(shape) == 2 and bare.is_rounded(name)]
    if not names:
        yield bare
        return
    method = settled.method.name if settled.method is not None else "own"
    version = sum(rule.version for rule in METHODS.values())  # what is kept may be rounded by any of them
    with QuantizedCache(cache_key(files, method, version), names) as cache:
        yield QuantizingSource(source, settled, files.name, cache)
