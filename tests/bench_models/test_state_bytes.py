"""The figure of states: bytes that change in the pools of an engine are those of the formula, and a miss is shown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.models import state_bytes
from bench.models.kinds import FULL, KINDS, LOCAL, WINDOWS, kv


@pytest.mark.parametrize("name", ["paged_int8", "gated_delta_rule"])
def test_a_sequence_writes_the_bytes_of_the_formula(name: str) -> None:
    row = state_bytes.written(KINDS[name])
    assert row["KV"] == row["KV by formula"] and row["states"] == row["states by formula"]
    assert row["KV"] + row["states"] > 0


def test_windows_hold_the_bytes_of_the_formula() -> None:
    fields = {
        **WINDOWS.fields,
        "num_hidden_layers": 6,
        "layer_types": [LOCAL] * 5 + [FULL],
        "sliding_window": 32,
    }
    kind = replace(WINDOWS, fields=fields, token_bytes=kv(6, 1, 32), windows=(*[32] * 5, 0))
    row = state_bytes.windowed(kind, 1500, step_tokens=64)
    assert row["tokens"] > 1500 and row["full"] > row["held"] == row["held by formula"]
    assert row["full"] == row["full by formula"] and row["equal answers"]


def test_other_bytes_are_shown_as_missed(capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "model_type": "llama",
        "tokens": 66,
        "KV": 10,
        "KV by formula": 10,
        "states": 0,
        "states by formula": 4,
    }
    assert not state_bytes.show("paged", row)
    assert "MISSED" in capsys.readouterr().out
    assert state_bytes.show("paged", row | {"states by formula": 0})
