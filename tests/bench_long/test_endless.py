"""The figures of a rolling window, on a fake engine."""

from __future__ import annotations

from typing import Any

import pytest

from bench.long import endless
from optkit.runtime.engine import Engine
from optkit.runtime.kv.rolling import RollingWindow
from tests.support.fakes import fake_engine

OPTIONS = {"max_model_len": 64, "vocab_size": 2048, "num_blocks": 64}


class Ids:
    input_ids = tuple((7 * i) % 2048 for i in range(400))


def engine(*_: Any, **__: Any) -> Engine:
    return fake_engine(options=dict(OPTIONS))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endless, "open_engine", engine)
    monkeypatch.setattr(endless, "load_tokenizer", lambda directory: lambda *_, **__: Ids)
    monkeypatch.setattr(endless, "EARLY", 100)
    monkeypatch.setattr(endless, "TURNS", 2)
    monkeypatch.setattr(endless, "STRETCH", 16)
    monkeypatch.setattr(endless, "STRETCHES", 3)


def run(*more: str) -> int:
    return endless.main(
        ["artifact", "--tokens", "400", "--positions", "300", "--rolling-window", "16", *more]
    )


@pytest.mark.usefixtures("small")
def test_the_command_prints_growth_and_loss(capsys: pytest.CaptureFixture[str]) -> None:
    run("--only", "growth", "--only", "loss")
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("blocks after the first") and " 0.000" in line for line in lines)
    for name in ("loss at 300 positions", "loss of the same tokens at 64 positions", "loss at the end less"):
        assert any(line.startswith(name) for line in lines)
    assert not any("MISSED" in line and "blocks" in line for line in lines)


@pytest.mark.usefixtures("small")
def test_both_answers_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    run("--only", "speed")
    assert "TPOT ratio" in capsys.readouterr().out


@pytest.mark.usefixtures("small")
def test_without_a_window_that_fits_nothing_is_measured() -> None:
    with pytest.raises(ValueError, match="tokens together"):
        run("--rolling-window", "64", "--only", "growth")


def test_losses_are_those_of_the_prompt() -> None:
    ids = Ids.input_ids[:40]
    whole = endless.nll(engine(), ids)
    assert len(whole) == 39 and min(whole) > 0
    rolled = endless.nll(engine(), ids, RollingWindow(16, 4))
    assert rolled[:15] == whole[:15]
    assert endless.nll(engine(), ids[5:45], None) != whole
