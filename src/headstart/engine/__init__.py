"""Drives the core with a real clock: the engine process (`loop`, `child`), the API process' handle on it
(`async_engine`, `process`), what passes between them (`ipc`), and offline use without either (`llm`)."""

from headstart.core.errors import QueueFull as QueueFullError
from headstart.core.errors import RequestRefused, RequestTooLong
from headstart.engine.async_engine import AsyncEngine, EngineDeadError, EngineLimits, EngineState, Reservation
from headstart.engine.ipc import EngineInfo

__all__ = [
    "AsyncEngine",
    "EngineDeadError",
    "EngineInfo",
    "EngineLimits",
    "EngineState",
    "QueueFullError",
    "RequestRefused",
    "RequestTooLong",
    "Reservation",
]
