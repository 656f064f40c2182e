"""Results of a benchmark beside their bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NONE: Mapping[str, float] = {}


def beyond(
    result: Mapping[str, Any], most: Mapping[str, float], least: Mapping[str, float] = NONE
) -> list[str]:
    """The names of the results above a bound in ``most`` or below a bound in ``least``; NaN is beyond both."""
    over = [name for name, bound in most.items() if name in result and not result[name] <= bound]
    return over + [name for name, bound in least.items() if name in result and not result[name] >= bound]


def print_numbers(
    result: Mapping[str, Any],
    missed: list[str],
    width: int,
    form: str,
    most: Mapping[str, float] = NONE,
) -> None:
    """Print a line for each number: the name in ``width`` columns, the value in ``form``, a bound, a miss."""
    for name, value in result.items():
        if isinstance(value, int | float):
            bound = f"   at most {most[name]:g}" if name in most else ""
            print(f"{name:{width}} {value:{form}}{bound}{'   MISSED' * (name in missed)}")
