"""How much memory a model's weights really take: what its parts hold, packed copies and all. Knows no layer by name."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

_OWN = "headstart."


def held_bytes(*parts: object) -> int:
    """Bytes of all tensors in `parts`, each storage once: a tied matrix may be shared, or packed a second time."""
    sizes: dict[tuple[str, int], int] = {}
    stack: list[object] = list(parts)
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            if item.is_mkldnn:  # opaque: no storage to ask
                sizes["packed", id(item)] = item.numel() * item.element_size()
            else:
                storage = item.untyped_storage()
                sizes["dense", storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, (tuple, list)):
            stack += item
        elif type(item).__module__.startswith(_OWN):
            stack += _attributes(item)
    return sum(sizes.values())


def _attributes(item: object) -> Iterator[object]:
    yield from getattr(item, "__dict__", {}).values()
    for kind in type(item).__mro__:
        for name in kind.__dict__.get("__slots__", ()):
            if hasattr(item, name):
                yield getattr(item, name)
