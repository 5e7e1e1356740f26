"""How big a model is, and how long it takes. Never imports torch."""

from headstart.perf.model_spec import ModelSpec, read_model_spec
from headstart.perf.rope_spec import RopeSpec

__all__ = ["ModelSpec", "RopeSpec", "read_model_spec"]
