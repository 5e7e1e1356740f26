"""Text and tokens: tokenizer, incremental detokenizer, chat template. Knows nothing of requests, HTTP or the engine.

Never imports torch or transformers.
"""

from headstart.text.chat_template import ChatTemplate, TemplateError
from headstart.text.detokenizer import Detokenizer
from headstart.text.recent import Open, Prompt, RecentTokens
from headstart.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "Open", "Prompt", "RecentTokens", "TemplateError", "Tokenizer"]
