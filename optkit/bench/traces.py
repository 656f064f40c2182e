"""Recorded load: files with the arrival, the prompt's length and the answer's length of each request.

Two formats are read, told apart by the first character:

* Mooncake (JSON lines): ``timestamp`` in milliseconds, ``input_length``, ``output_length``, and ``hash_ids``, an id for
  each 512 tokens of the prompt. Two prompts with equal ids at the start share a prefix of so many blocks.
* Azure (CSV): ``TIMESTAMP``, ``ContextTokens``, ``GeneratedTokens``; no prefixes.

Lengths are those of large models; ``scaled`` divides lengths and blocks alike, so the shares of prefixes stay.
"""

from __future__ import annotations

import csv
import json
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from optkit.errors import UserError

BLOCK = 512  # tokens of a prefix hash
LONGEST = 1 << 24  # tokens of a prompt or an answer
MOST_SCALE = 1e6
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True)
class TraceRow:
    """A request of a trace. ``at`` is in seconds; ``hash_ids`` is empty without prefixes."""

    at: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()

    def scaled(self, scale: float) -> TraceRow:
        """The request with lengths times ``scale``, at least one token each."""
        input_len, output_len = (max(1, round(n * scale)) for n in (self.input_len, self.output_len))
        return TraceRow(self.at, input_len, output_len, self.hash_ids)


def scale_of(text: str) -> float:
    """A factor of lengths as a number or a fraction, as in 1/32.

    Raises:
        UserError: no number above 0 and up to ``MOST_SCALE``.
    """
    try:
        found = float(Fraction(text))
    except (ValueError, ZeroDivisionError, OverflowError):
        found = 0.0
    if not 0 < found <= MOST_SCALE:
        raise UserError(
            f"no factor of lengths: {text!r:.40}", where="--trace-scale", fix="--trace-scale 1/32"
        )
    return found


def block_len(scale: float) -> int:
    """Tokens of a prefix block at ``scale``."""
    return max(1, round(BLOCK * scale))


@lru_cache(maxsize=4)
def read_trace(path: str, count: int | None = None) -> tuple[TraceRow, ...]:
    """The first ``count`` requests of a file, or all, in order of arrival.

    Raises:
        UserError: no such file, a line in another format, or too few lines.
    """
    try:
        with Path(path).open(encoding="utf-8") as file:
            rows = sorted(islice(_rows(file, path), count), key=lambda row: row.at)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"the trace can't be read: {error}", where=path) from error
    if count is not None and len(rows) < count:
        raise UserError(
            f"the trace has {len(rows)} requests, the run asks for {count}",
            where=path,
            fix=f"--num-prompts {len(rows)}",
        )
    return tuple(rows)


def _rows(file: TextIO, path: str) -> Iterator[TraceRow]:
    first = file.read(1)
    if not first:
        raise UserError("the trace is empty", where=path, fix="docs/benchmarking.md describes both formats")
    file.seek(0)
    parse, lines = (_mooncake, _json_lines(file)) if first == "{" else (_azure, _csv_lines(file, path))
    for number, values in lines:
        try:
            yield _checked(parse(values))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            fix = "a line is as in Mooncake's traces: timestamp (ms), input_length, output_length, hash_ids"
            raise UserError(
                f"no request of a trace ({reason(error)})", where=f"{path}:{number}", fix=fix
            ) from error


def reason(error: Exception, most: int = 80) -> str:
    """The message of a parsing error in at most ``most`` characters, whole words; a missing key is named as one."""
    text = f"{error} is missing" if isinstance(error, KeyError) else str(error) or type(error).__name__
    return textwrap.shorten(text, most, placeholder=" ...")


def _json_lines(file: TextIO) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(file, 1):
        if line.strip():
            yield number, line


def _csv_lines(file: Iterable[str], path: str) -> Iterator[tuple[int, Any]]:
    table = csv.DictReader(file)
    if not set(AZURE) <= set(table.fieldnames or ()):
        raise UserError(
            "neither JSON lines nor a CSV file with " + ", ".join(AZURE),
            where=f"{path}:1",
            fix="docs/benchmarking.md describes both formats",
        )
    for row in table:
        yield table.line_num, row


def _mooncake(line: str) -> TraceRow:
    values = json.loads(line)
    ids = tuple(values.get("hash_ids") or ())
    if not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError("hash_ids")
    return TraceRow(values["timestamp"] / 1e3, values["input_length"], values["output_length"], ids)


def _azure(values: dict[str, str]) -> TraceRow:
    at = datetime.fromisoformat(values["TIMESTAMP"][:26]).replace(tzinfo=UTC)
    return TraceRow(at.timestamp(), int(values["ContextTokens"]), int(values["GeneratedTokens"]))


def _checked(row: TraceRow) -> TraceRow:
    for length in (row.input_len, row.output_len):
        if type(length) is not int or not 0 < length <= LONGEST:
            raise ValueError(f"length {length!r}")
    if not 0 <= row.at < float("inf"):
        raise ValueError(f"time {row.at!r}")
    return row
