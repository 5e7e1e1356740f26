"""Text to token ids and back. Owns the loading of a model's tokenizer (tokenizer.json or GGUF) and its special ids.

Must not know requests, HTTP or chat; never imports torch or transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from headstart.hub import ModelError, ModelFiles, gguf_reader, read_json
from headstart.text.control_tokens import Piece, PromptText
from headstart.text.gguf_vocab import Vocabulary, vocabulary_of_gguf
from headstart.text.prefix_space import without_prefix_space
from headstart.text.seams import Seams
from headstart.text.token_bytes import ByteTable, decoder_state, piece_rules


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads; encoding releases the GIL."""

    def __init__(self, vocabulary: Vocabulary, *, source: str = "the tokenizer") -> None:
        """Raises `ModelError` naming `source` if the tokenizer's decoder is of an unsupported kind."""
        self._tokenizer = vocabulary.tokenizer
        self._tokenizer.no_truncation()  # some files carry their training's settings
        self._tokenizer.no_padding()
        try:
            rules = piece_rules(decoder_state(self._tokenizer))
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{source} cannot be used: {error}") from None
        added = self._tokenizer.get_added_tokens_decoder()
        special = dict.fromkeys((index for index, token in added.items() if token.special), b"")
        named = {vocabulary.bos_token_id, *vocabulary.eos_token_ids}
        self.control_tokens = frozenset(added[index].content for index in added if index in special or index in named)
        self._seams = Seams(added.values(), self.control_tokens)
        self._bytes = ByteTable(self._tokenizer, rules.to_bytes, {})
        self._visible_bytes = ByteTable(self._tokenizer, rules.to_bytes, special)
        self.strip_leading_spaces = rules.strip_leading_spaces
        self.bos_token_id = vocabulary.bos_token_id
        self.eos_token_ids = vocabulary.eos_token_ids
        # One more than the highest id: added tokens may leave gaps.
        self.vocab_size = max(self._tokenizer.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)

    @classmethod
    def load(cls, files: ModelFiles) -> Tokenizer:
        """The tokenizer of a model. Raises `ModelError` where there is none, or a damaged or unsupported one."""
        if files.tokenizer is not None:
            return cls(_vocabulary_of_folder(files, files.tokenizer), source=str(files.tokenizer))
        if files.format == "gguf":
            return cls(vocabulary_of_gguf(gguf_reader(files.weights[0])), source=str(files.weights[0]))
        if (files.root / "tokenizer.model").is_file():
            raise ModelError(
                f"{files.root} has only a SentencePiece tokenizer.model: write tokenizer.json with "
                "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
        raise ModelError(f"{files.root} lacks tokenizer.json: finish the download")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens in it are recognised, BOS/EOS are added as the model wants.

        A chat template's `PromptText` says itself where they are recognised and where they are only text.
        Raises `ValueError` for text that is no valid Unicode (half of a surrogate pair).
        """
        if isinstance(text, PromptText):
            return self.joined(self.encode_pieces(text.pieces), add_special_tokens)
        return _encode(self._tokenizer, [text], add_special_tokens)[0]

    def pieces(self, text: str) -> list[Piece]:
        """`text` in pieces that can be encoded apart: the ids of all, `joined`, are those of the whole."""
        whole = text.pieces if isinstance(text, PromptText) else (Piece(text, False),)
        cut = [
            (piece,) if piece.continues else (Piece(part, False) for part in self._seams.cut(piece.text))
            for piece in whole
        ]
        return [piece for parts in cut for piece in parts]

    def encode_pieces(self, pieces: Sequence[Piece]) -> list[list[int]]:
        """The ids of each piece. Raises `ValueError` as `encode` does."""
        going_on = iter(_encode(self._continuing, [piece.text for piece in pieces if piece.continues], False))
        others = iter(_encode(self._tokenizer, [piece.text for piece in pieces if not piece.continues], False))
        return [next(going_on if piece.continues else others) for piece in pieces]

    def joined(self, parts: Iterable[Sequence[int]], add_special_tokens: bool) -> list[int]:
        """One prompt of the ids of pieces; with what the model wants around it."""
        ids = [token for part in parts for token in part]
        return [*self.marks[0], *ids, *self.marks[1]] if add_special_tokens else ids

    @cached_property
    def marks(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids that the model wants before and after a text (BOS, EOS), whatever the text."""
        (plain,), (marked,) = (_encode(self._tokenizer, ["a"], special) for special in (False, True))
        before = next(start for start in range(len(marked) + 1) if marked[start : start + len(plain)] == plain)
        return tuple(marked[:before]), tuple(marked[before + len(plain) :])

    @cached_property
    def _continuing(self) -> tokenizers.Tokenizer:
        """For text that goes on: without the space that SentencePiece models put before a text."""
        return without_prefix_space(self._tokenizer)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Bytes that are no valid UTF-8 become U+FFFD; ids without a token are nothing."""
        data = b"".join(map(self.byte_table(skip_special_tokens).__getitem__, ids))
        for _ in range(self.strip_leading_spaces):
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def byte_table(self, skip_special_tokens: bool) -> ByteTable:
        """Token id -> the bytes it adds to the text (special tokens: none if they are skipped)."""
        return self._visible_bytes if skip_special_tokens else self._bytes

    def token_text(self, token_id: int) -> str:
        """The token alone as text, special or not; U+FFFD for parts of a character."""
        return self._bytes[token_id].decode("utf-8", "replace")


def _encode(tokenizer: tokenizers.Tokenizer, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
    try:
        return [found.ids for found in tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]
    except TypeError:  # what the library makes of a str that has no UTF-8
        for text in texts:
            _check_unicode(text)
        raise


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text is no valid Unicode: a lone surrogate at character {error.start}") from None


def special_token_texts(files: ModelFiles, tokenizer: Tokenizer) -> dict[str, str]:
    """Texts that chat templates name: bos_token, eos_token and what else tokenizer_config.json gives of the kind."""
    texts = {}
    if tokenizer.bos_token_id is not None:
        texts["bos_token"] = tokenizer.token_text(tokenizer.bos_token_id)
    if tokenizer.eos_token_ids:
        texts["eos_token"] = tokenizer.token_text(tokenizer.eos_token_ids[0])
    if files.tokenizer_config is not None:
        config = read_json(files.tokenizer_config)
        for key, value in config.items():
            text = _token_content(value)
            if key.endswith("_token") and text is not None:
                texts[key] = text
    return texts


def _vocabulary_of_folder(files: ModelFiles, path: Path) -> Vocabulary:
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception for whatever is wrong
        raise ModelError(f"{path} is damaged or of an unknown kind: {error}; download it again") from None
    tokenizer_config, config, generation = (
        {} if file is None else read_json(file)
        for file in (files.tokenizer_config, files.config, files.generation_config)
    )
    named_bos, named_eos = (
        _id_of(tokenizer, _token_content(tokenizer_config.get(key))) for key in ("bos_token", "eos_token")
    )
    bos = named_bos if named_bos is not None else next(iter(_ids(config, "bos_token_id")), None)
    ends = _ids(generation, "eos_token_id") or _ids(config, "eos_token_id")
    eos = ends if named_eos is None else [named_eos, *ends]
    return Vocabulary(tokenizer, bos, tuple(dict.fromkeys(eos)))


def _token_content(value: Any) -> str | None:
    """A token in tokenizer_config.json: a string, or an object with its `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _id_of(tokenizer: tokenizers.Tokenizer, token: str | None) -> int | None:
    return None if token is None else tokenizer.token_to_id(token)


def _ids(config: Mapping[str, Any], key: str) -> list[int]:
    value = config.get(key)
    values = value if isinstance(value, list) else [value]
    return [index for index in values if isinstance(index, int) and not isinstance(index, bool)]
