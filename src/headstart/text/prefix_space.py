"""A tokenizer for the middle of a text: the same one, without the space that it would put before a beginning.

Owns which settings of the `tokenizers` library add that space.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

_Step = Mapping[str, Any]


def without_prefix_space(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """`tokenizer` itself if it adds no space, otherwise one that shares its vocabulary and adds none."""
    steps = [_state(tokenizer.normalizer), _state(tokenizer.pre_tokenizer)]
    changed = [_without(step) for step in steps]
    if changed == steps:
        return tokenizer
    shell = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    parts = tokenizers.Tokenizer.from_str(json.dumps({**shell, "normalizer": changed[0], "pre_tokenizer": changed[1]}))
    copy = tokenizers.Tokenizer(tokenizer.model)
    if changed[0] is not None:
        copy.normalizer = parts.normalizer
    if changed[1] is not None:
        copy.pre_tokenizer = parts.pre_tokenizer
    added = tokenizer.get_added_tokens_decoder()
    copy.add_tokens([added[index] for index in sorted(added)])
    assert all(copy.token_to_id(token.content) == index for index, token in added.items())
    return copy


def _state(part: Normalizer | PreTokenizer | None) -> _Step | None:
    """A part as tokenizer.json writes it."""
    if part is None:
        return None
    state: _Step = json.loads(part.__getstate__())
    return state


def _without(step: _Step | None) -> _Step | None:
    if step is None:
        return None
    match step["type"]:
        case "Sequence":
            key = "normalizers" if "normalizers" in step else "pretokenizers"
            kept = [_without(inner) for inner in step[key]]
            return {**step, key: [inner for inner in kept if inner is not None]}
        case "Prepend":
            return None
        case "Metaspace":
            return {**step, "prepend_scheme": "never"}
        case "ByteLevel":
            return {**step, "add_prefix_space": False}
    return step
