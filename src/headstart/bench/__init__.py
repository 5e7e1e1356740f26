"""`headstart bench`: an open-loop load client for any OpenAI-compatible server, and what it makes of the answers.

Talks HTTP only; must not know the engine, the core or the server that it measures.
"""

from headstart.bench.options import BenchError, BenchOptions
from headstart.bench.report import Report
from headstart.bench.run import run

__all__ = ["BenchError", "BenchOptions", "Report", "run"]
