"""Models: one decoder driven by a `ModelSpec`, and its loading. Must not know requests or schedulers."""

from headstart.models.decoder import Decoder
from headstart.models.loader import load_model

__all__ = ["Decoder", "load_model"]
