"""Least times of KV in few bits: the arithmetic by hand, and the measurement on a small artifact's runner."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.long import kv_bits
from bench.long._few_bits import SCHEMES, Quality
from bench.long.kv_bits import CONTEXT, Row, Times, shares, tokens
from optkit.errors import UserError
from optkit.evaluation.quality import Estimate
from tests.support.fakes import fake_engine


def test_least_times_by_hand() -> None:
    times = Times({CONTEXT: [0.010, 0.012], tokens(0.5): [0.008, 0.009]}, [0.001, 0.003])
    few, same = times.fewer_tokens(0.5), times.same_products(0.5)
    assert few.value == pytest.approx((0.8 + 0.75) / 2) and few.stderr == pytest.approx(0.025)
    assert same.value == pytest.approx(1 - 0.5 * 0.002 / 0.011)


def test_bytes_are_shares_of_an_int8_row_with_its_float32_scale() -> None:
    found = shares(64)
    assert list(found) == [scheme.name for scheme in SCHEMES]
    assert found["K4 channel, V4 token"] == pytest.approx((32 + 32 + 8 + 4) / (2 * 68))


@pytest.mark.parametrize(
    ("kl", "few", "same", "expected"),
    [
        (0.004, 0.9, 0.94, True),
        (0.006, 0.9, 0.94, False),
        (0.004, 0.9, 0.96, False),
        (0.004, 0.96, 0.9, False),
    ],
)
def test_a_scheme_promises_within_all_bounds(kl: float, few: float, same: float, expected: bool) -> None:
    quality = Quality(Estimate(kl, 0.0), Estimate(1.0, 0.0))
    assert Row(0.5, quality, Estimate(few, 0.0), Estimate(same, 0.0)).promises is expected


class Runner:
    """A runner whose steps take a millisecond, and one more with blocks apart."""

    def __init__(self) -> None:
        self.tables: list[list[int]] = []

    def execute(self, batch: Any) -> None:
        (item,) = batch.items
        (table,) = item.request.block_tables
        self.tables.append(table)
        time.sleep(0.001 * len({*table[:2]}))


def test_reading_is_the_step_with_blocks_apart_less_that_with_one_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_bits, "ROUNDS", 2)
    runner = Runner()
    engine: Any = SimpleNamespace(config=SimpleNamespace(block_size=32), runner=runner)
    found = kv_bits.reading_seconds(engine)
    assert len(found) == 2 and all(0.0005 < each < 0.003 for each in found)
    assert all(len(table) == -(-CONTEXT // 32) for table in runner.tables)
    assert {len(set(table)) for table in runner.tables} == {1, 60}


def test_the_command_measures_steps_by_length_and_saves_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"max_model_len": 512, "vocab_size": 40_000, "num_blocks": 256}
    monkeypatch.setattr(kv_bits, "CONTEXT", 200)
    monkeypatch.setattr(kv_bits, "ROUNDS", 2)
    monkeypatch.setattr(kv_bits, "head_dim", lambda *_: 64)
    monkeypatch.setattr(kv_bits, "open_engine", lambda *_, **__: fake_engine(options=dict(options)))
    monkeypatch.setattr(kv_bits, "reading_seconds", lambda _: [0.0, 0.0])
    file = tmp_path / "bits.json"
    assert kv_bits.main(["artifact", "--only", "time", "--save-result", str(file)]) == 1
    saved = json.loads(file.read_text())
    assert saved["times"]["steps"].keys() == {str(tokens(share)) for share in [1.0, *shares(64).values()]}
    assert all(len(rounds) == 2 for rounds in saved["times"]["steps"].values())
    assert (
        "within all bounds: none" in capsys.readouterr().out
    )  # reading costs nothing, so bytes save nothing


def test_an_artifact_without_int8_kv_is_refused() -> None:
    with pytest.raises(UserError, match="kv_int8"):
        kv_bits.head_dim(fake_engine(), "artifact")
