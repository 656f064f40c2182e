"""Values that break things: sizes at the borders of types, and literals of other kinds than expected."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

INTS = (
    *(0, 1, -1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 192, 255, 256),
    *(1000, 65535, 65536, 50_000_000, -50_000_000, 2**31 - 1, 2**31, -(2**31), 2**32, 2**33 + 1, 2**40),
    *(2**62, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30),
)
FLOATS: tuple[Any, ...] = (
    *(0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, 1e-300, 1e300),
    *({"float": "nan"}, {"float": "inf"}, {"float": "-inf"}),
)
OTHERS: tuple[Any, ...] = (
    *(None, True, False, [], [0], [1, -1], [[2]], {}, {"str": "tanh"}, {"str": ""}, {"str": "float8_e4m3fn"}),
    *({"dtype": "float32"}, {"dtype": "int8"}, {"dtype": "int64"}, {"dtype": "bool"}, {"dtype": "Tensor"}),
    *("", "%", "@", "text", "../x", "é\n\x00", {"int": 3}, {"float": "x"}),
)

Place = tuple[Any, Any]  # a list or dict and an index or key in it


def places(value: Any) -> Iterator[Place]:
    """Every place in nested lists and dicts."""
    entries = (
        enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    )
    for key, item in list(entries):
        yield value, key
        yield from places(item)


def like(dice: Random, value: Any) -> Any:
    """A value of the kind of ``value``, mostly: near it, at a border, or of another kind."""
    if dice.random() < 0.15:
        return dice.choice(OTHERS)
    if isinstance(value, bool) or value is None:
        return dice.choice((True, False, None, 1, 0, -1))
    if isinstance(value, int):
        near = (value - 1, value + 1, value * 2, value // 2, -value, value * 3, value + 8, value * 1000)
        return dice.choice(near) if dice.random() < 0.5 else dice.choice(INTS)
    if isinstance(value, float):
        return dice.choice(FLOATS) if dice.random() < 0.7 else dice.choice(INTS)
    return dice.choice(dice.choice((INTS, FLOATS, OTHERS)))
