"""Finding a model's files, by folder, GGUF file, hub id or built-in alias. Knows nothing of what the files mean.

Never imports torch or transformers.
"""

from headstart.hub.aliases import ALIASES
from headstart.hub.files import ModelError, ModelFiles, Progress, files_of_folder, files_of_gguf, read_json
from headstart.hub.gguf_reader import GGUFFile, GGUFTensor, gguf_reader
from headstart.hub.resolve import resolve

__all__ = [
    "ALIASES",
    "GGUFFile",
    "GGUFTensor",
    "ModelError",
    "ModelFiles",
    "Progress",
    "files_of_folder",
    "files_of_gguf",
    "gguf_reader",
    "read_json",
    "resolve",
]
