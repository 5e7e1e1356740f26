"""Headstart: an LLM inference server built for the time to first token.

Importing the package costs next to nothing: `LLM` and `SamplingParams` are loaded when they are first asked for.
"""

from importlib import import_module

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

_LAZY = {"LLM": "headstart.llm", "SamplingParams": "headstart.core.request"}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
