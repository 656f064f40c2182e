"""The number of a decoder layer in names of weights and checkpoint tensors: ``model.layers.12.mlp.up_proj.weight``."""

from __future__ import annotations

import re

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)", re.ASCII)


def layer_number(name: str) -> int | None:
    """The first number between two dots of ``name``; None for a name without."""
    found = NUMBER.search(name)
    return int(found.group()) if found else None


def with_layer_number(name: str, number: int) -> str:
    """``name`` with ``number`` in the place of the layer's number."""
    return NUMBER.sub(str(number), name, count=1)
