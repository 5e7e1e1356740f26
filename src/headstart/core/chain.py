"""Names of prefixes that outlive the process: the same tokens under the same salt have the same name everywhere.

Owns how a name is made. A name is 128 bits of BLAKE2b over the name of the prefix before the block and the block's
tokens, so that two prefixes share one with a chance of some 10^-20 after ten billion blocks.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

NAME_BYTES = 16


def root_name(salt: str) -> bytes:
    """The name of the empty prefix under an isolation key."""
    return hashlib.blake2b(
        salt.encode("utf-8", "surrogatepass"), digest_size=NAME_BYTES, person=b"headstart-salt"
    ).digest()


def next_name(before: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of the prefix that is one block longer."""
    return hashlib.blake2b(before + array("q", token_ids).tobytes(), digest_size=NAME_BYTES).digest()


def names(salt: str, token_ids: Sequence[int], block_size: int, num_blocks: int) -> tuple[bytes, ...]:
    """Of the prefixes of 1, 2, .. `num_blocks` whole blocks."""
    name = root_name(salt)
    found = []
    for start in range(0, num_blocks * block_size, block_size):
        name = next_name(name, token_ids[start : start + block_size])
        found.append(name)
    return tuple(found)
