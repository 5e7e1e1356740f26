"""Matrices on their way from a checkpoint to the operations: kept in their codes, quantized here, or made floats.

Owns what happens to each matrix and the cache of what was quantized; knows file formats only through `WeightSource` and
the rules of rounding only through `QuantMethod`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor

from headstart.hub import ModelError, ModelFiles
from headstart.models.sources import WeightSource
from headstart.ops import Matrix, QuantizedWeight
from headstart.perf.tensors import EMBEDDINGS, LM_HEAD
from headstart.quant.cache import QuantizedCache, cache_key
from headstart.quant.method import METHODS, QuantizationError, QuantMethod
from headstart.quant.settle import SettledQuantization

_KEPT = "kept"  # the cache's word for a checkpoint's own codes, where they had to be rounded to a format of ours


class MatrixReader:
    """Reads matrices by name. A context manager: the cache is complete when the block ends without an error."""

    def __init__(
        self,
        source: WeightSource,
        files: ModelFiles,
        names: Collection[str],
        quantization: SettledQuantization,
        read_floats: Callable[[str], Tensor],
    ) -> None:
        """read_floats: the float tensor of a name, checked. names: of the matrices that will be read."""
        self._source = source
        self._where = files.name
        self._quantization = quantization
        self._read_floats = read_floats
        rounded = [name for name in names if self._is_rounded(name)]
        self._cache = None
        if rounded:
            method = quantization.method
            # A file may hold codes of several rules: tables in 8 bits, a checkpoint's own that were rounded to ours.
            version = sum(100**place * rule.version for place, rule in enumerate(METHODS.values()))
            self._cache = QuantizedCache(cache_key(files, _KEPT if method is None else method.name, version), rounded)

    def __enter__(self) -> MatrixReader:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._cache is not None:
            self._cache.__exit__(kind, error, trace)

    def read(self, name: str) -> Matrix:
        """The matrix as the operations are to hold it. Raises `ModelError` naming the tensor."""
        if not self._is_rounded(name):
            return self._source.read_matrix(name) if self._is_kept(name) else self._read_floats(name)
        assert self._cache is not None
        cached = self._cache.read(name)
        if cached is not None:
            return cached
        made = self._round(name)
        self._cache.add(name, made)
        return made

    def _is_kept(self, name: str) -> bool:
        return self._source.formats.get(name) in self._quantization.keep

    def _is_rounded(self, name: str) -> bool:
        """Whether codes must be made, which takes a while."""
        if self._is_kept(name):
            return self._source.is_rounded(name)
        return self._quantization.method is not None

    def _round(self, name: str) -> QuantizedWeight:
        if self._is_kept(name):
            weight = self._source.read_matrix(name)
            assert isinstance(weight, QuantizedWeight)
            return weight
        assert self._quantization.method is not None
        try:
            # As the checkpoint has it: what was cast to another dtype would have other codes.
            return _method_for(name, self._quantization.method).quantize(self._source.read(name))
        except QuantizationError as error:
            raise ModelError(f"{self._where}: tensor {name} {error}") from None


def _method_for(name: str, method: QuantMethod) -> QuantMethod:
    """Embeddings and LM head are kept in 8 bits where the rest has 4: they are read once a token, and errors in them
    reach every logit."""
    return METHODS["int8"] if method.name == "int4" and name in (EMBEDDINGS, LM_HEAD) else method
