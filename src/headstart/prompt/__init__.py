"""What in a prompt costs time to first token: where prefixes part, what breaks the cache, what could be left out.

Pure functions over chat requests. Knows no model, tokenizer or server: who calls brings a function that counts tokens.
"""

from headstart.prompt.chat import ChatPrompt, Part, PromptError, read_request
from headstart.prompt.divergence import Divergence, diverge
from headstart.prompt.kinds import Kind

__all__ = ["ChatPrompt", "Divergence", "Kind", "Part", "PromptError", "diverge", "read_request"]
