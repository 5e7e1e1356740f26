"""The OpenAI-compatible HTTP API of one served model. Knows requests and text; the engine is behind `AsyncEngine`."""

from headstart.server.app import create_app
from headstart.server.serve import AddressError, bind, listen, make_server, serve, start_listening, url_of

__all__ = ["AddressError", "bind", "create_app", "listen", "make_server", "serve", "start_listening", "url_of"]
