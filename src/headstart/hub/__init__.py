"""Finding a model's files, by folder, GGUF file, hub id or built-in alias. Knows nothing of what the files mean.

Never imports torch or transformers.
"""

from headstart.hub.files import ModelError, ModelFiles, Progress, files_of_folder, files_of_gguf, read_json

__all__ = ["ModelError", "ModelFiles", "Progress", "files_of_folder", "files_of_gguf", "read_json"]
