"""Runs the model: requests and steps in, tokens out. Owns the requests' tokens and block tables on the device side."""

from headstart.worker.worker import Worker

__all__ = ["Worker"]
