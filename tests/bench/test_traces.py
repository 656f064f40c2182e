"""Trace files: both formats, scales, and one clear line for each damaged file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optkit.bench.traces import TraceRow, block_len, read_trace, reason, scale_of
from optkit.errors import UserError

ROWS = [
    {"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [0, 2]},
    {"timestamp": 0, "input_length": 1100, "output_length": 64, "hash_ids": [0, 1, 7]},
]
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
)


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "trace"
    path.write_text(text)
    return str(path)


def test_mooncake_rows_come_in_order_of_arrival(tmp_path: Path) -> None:
    path = written(tmp_path, "\n".join(map(json.dumps, ROWS)) + "\n\n")
    assert read_trace(path, 2) == (TraceRow(0.0, 1100, 64, (0, 1, 7)), TraceRow(3.0, 700, 5, (0, 2)))


def test_azure_rows_have_times_in_seconds(tmp_path: Path) -> None:
    one, two = read_trace(written(tmp_path, AZURE), 2)
    assert (one.input_len, one.output_len, two.output_len, one.hash_ids) == (374, 44, 109, ())
    assert two.at - one.at == pytest.approx(4.314579, abs=1e-6)


def test_scale_divides_lengths_and_blocks() -> None:
    row = TraceRow(0.0, 1100, 10, (0, 1, 2)).scaled(1 / 32)
    assert (row.input_len, row.output_len, row.hash_ids) == (34, 1, (0, 1, 2))
    assert (block_len(1 / 32), block_len(1e-9)) == (16, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"timestamp": 0}\n', "trace:1"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1}\n', "length 0"),
        ('{"timestamp": 0, "input_length": 1.5, "output_length": 1}\n', "length 1.5"),
        ('{"timestamp": ' + "9" * 400 + ', "input_length": 1, "output_length": 1}\n', "trace:1"),
        ('{"timestamp": -1, "input_length": 1, "output_length": 1}\n', "time"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": ["a"]}\n', "hash_ids"),
        ("{broken\n", "trace:1"),
        ("a,b\n1,2\n", "TIMESTAMP"),
        (AZURE + "yesterday,1,1\n", "trace:4"),
        (AZURE, "has 2 requests"),
        ("", "the trace is empty"),
    ],
)
def test_a_damaged_trace_is_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_trace(written(tmp_path, text), 3)


def test_a_missing_trace_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="can't be read"):
        read_trace(str(tmp_path / "none"), 1)


def test_a_scale_is_a_number_or_a_fraction() -> None:
    assert [scale_of(text) for text in ("1/32", "0.5", " 2 ", "1e-3")] == [1 / 32, 0.5, 2.0, 1e-3]
    for text in ("", "x", "1/0", "0", "-1/2", "inf", "nan", "1e400", "1/"):
        with pytest.raises(UserError, match="--trace-scale"):
            scale_of(text)


def test_the_reason_of_a_damaged_line_is_no_code() -> None:
    assert reason(KeyError("input_length")) == "'input_length' is missing"
    assert (
        reason(ValueError("word " * 50)).endswith("word ...") and len(reason(ValueError("word " * 50))) <= 80
    )
    assert reason(RecursionError()) == "RecursionError"
