"""The choice of a linear layer's implementation by its number of tokens, from a table of measured times.

``tables/sm_90.json`` has, for each op and stored type, the timed layers: N and K, the times, and the ``best``
implementation up to each number of tokens. A layer takes the row of the nearest N and K. ``source`` of a table is
``measured``, written by ``python -m bench.gpu.run``, or ``published``, from published times of comparable kernels
(its ``note``).

The choice is made in Python when a layer is called. In a CUDA graph the layer is called once, at capture.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "tables"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Timing:
    """``kernel`` of ``op`` took ``us`` microseconds for m tokens, n outputs and k inputs of stored type ``stored``."""

    op: str
    stored: str
    kernel: str
    m: int
    n: int
    k: int
    us: float


def choose(op: str, stored: str, shape: tuple[int, int, int], arch: str, able: Mapping[str, bool]) -> str:
    """The name of the implementation for a layer of ``shape`` (m, n, k), out of ``able``.

    The table's best where ``able`` is true, else the first true one: ``able`` is in order of preference.
    """
    best = winner(op, stored, shape, arch)
    return best if best is not None and able.get(best) else next(name for name, can in able.items() if can)


@cache
def winner(op: str, stored: str, shape: tuple[int, int, int], arch: str) -> str | None:
    """The table's best for m tokens; None without a row."""
    m, n, k = shape
    rows = [row for row in table(arch)["layers"] if (row["op"], row["stored"]) == (op, stored)]
    if not rows:
        return None
    nearest = min(rows, key=lambda row: abs(math.log(row["n"] / n)) + abs(math.log(row["k"] / k)))
    return next((name for most, name in nearest["best"] if most is None or m <= most), None)


@cache
def table(arch: str) -> dict[str, Any]:
    """The table of an architecture, with no layers where there is none."""
    file = FOLDER / f"{arch}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"layers": []}


def measured(timings: Iterable[Timing], arch: str, note: str) -> dict[str, Any]:
    """A table of ``timings``; ``note`` says on which machine, with which versions and when."""
    layers: dict[tuple[str, str, int, int], dict[int, dict[str, float]]] = {}
    for timing in timings:
        times = layers.setdefault((timing.op, timing.stored, timing.n, timing.k), {})
        times.setdefault(timing.m, {})[timing.kernel] = timing.us
    return {
        "schema_version": SCHEMA_VERSION,
        "architecture": arch,
        "source": "measured",
        "note": note,
        "layers": [
            {"op": op, "stored": stored, "n": n, "k": k, "best": best_of(times), "us": ordered(times)}
            for (op, stored, n, k), times in sorted(layers.items())
        ],
    }


def best_of(times: Mapping[int, Mapping[str, float]]) -> list[list[Any]]:
    """[most tokens, name] in rising order; the border between two measured numbers is their geometric mean."""
    best: list[list[Any]] = []
    points = sorted(times)
    for m, following in zip(points, [*points[1:], None], strict=True):
        name = min(times[m], key=times[m].__getitem__)
        most = None if following is None else math.isqrt(m * following)
        if best and best[-1][1] == name:
            best[-1][0] = most
        else:
            best.append([most, name])
    return best


def ordered(times: Mapping[int, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    return {str(m): dict(sorted(times[m].items())) for m in sorted(times)}


def save(new: Mapping[str, Any], folder: Path = FOLDER) -> Path:
    """Write a table for ``choose`` into a checkout; the next release then holds the table."""
    file = folder / f"{new['architecture']}.json"
    file.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")
    table.cache_clear()
    winner.cache_clear()
    return file
