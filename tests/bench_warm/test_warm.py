"""The benchmark of warm prefixes: bounds, texts, and typing ahead against a server on a fake model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from bench.warm import __main__ as command
from bench.warm import typing_ahead
from optkit.artifact.manifest import MANIFEST
from optkit.artifact.prefix import BLOCKS_FILE
from tests.support.chat_templates import QWEN
from tests.support.model_directory import save_model
from tests.support.quick import quick
from tests.support.serve_fakes import SteppedEngine, served, tiny_app
from tests.support.small_runs import run
from tests.support.tiny_tokenizer import tiny_tokenizer


def test_missed_bounds_are_named_and_a_missing_number_misses() -> None:
    good = {"typing: TTFT ratio": 0.05, "baked: start, ms more": -3.0}
    assert command.missed_bounds(good) == []
    assert command.missed_bounds({"typing: TTFT ratio": float("nan")}) == ["typing: TTFT ratio"]
    assert command.missed_bounds({"baked: TTFT ratio": 0.2}) == ["baked: TTFT ratio"]


def test_texts_have_the_tokens_asked_for_and_differ() -> None:
    tokenizer = tiny_tokenizer()
    first, second = (typing_ahead.text_of(tokenizer, 50, seed) for seed in (0, 1))
    assert first != second and 40 <= len(tokenizer.encode(first)) <= 80


def test_percentile() -> None:
    assert typing_ahead.percentile(range(100), 0.95) == 95
    assert typing_ahead.percentile([], 0.95) != typing_ahead.percentile([], 0.95)


def test_an_artifact_with_baked_prompts_needs_its_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["somewhere", "--baked", "elsewhere"])
    assert "--prompt" in capsys.readouterr().err


def test_a_quick_run_bakes_a_copy_and_saves_every_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Live servers on a tiny model: what is checked is the command, not the figures."""
    quick(monkeypatch.setattr)
    source, plain, saved = tmp_path / "source", tmp_path / "plain", tmp_path / "result.json"
    save_model(source)
    (source / "chat_template.jinja").write_text(QWEN)
    run(source, plain, "passes:\n  flash_attention: {}\n  kv_int8: {}\n")
    before = (plain / MANIFEST).read_bytes()
    prompt = tmp_path / "system.txt"
    prompt.write_text("You answer in few words, politely, and never guess. " * 3)
    options = ["--quick", "--only", "baked", "--prompt", str(prompt), "--save-result", str(saved)]
    command.main([str(plain), *options])
    found = json.loads(saved.read_text())
    assert found["baked: answers that differ"] == 0
    assert 0.5 * found["baked: prompt tokens"] < found["baked: tokens found"] < found["baked: prompt tokens"]
    assert found["baked: bytes beside the KV"] < 65536 < 65536 + found["baked: KV bytes"]
    assert found["quick"] and found["rounds"] == 1 and found["load_average_after"] >= 0
    assert len(found["baked: first"]["with"]) == len(found["baked: starts"]["without"]) == 1
    assert (plain / MANIFEST).read_bytes() == before and not (plain / BLOCKS_FILE).exists()
    assert "load_average_before" in capsys.readouterr().out


def test_typing_is_measured_against_the_message_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typing_ahead, "CALL_SECONDS", 0.05)
    app = tiny_app(SteppedEngine(max_model_len=1024), max_model_len=1024)
    texts = [typing_ahead.text_of(tiny_tokenizer(), 150, seed) for seed in range(2)]
    with served(app) as url:
        found = asyncio.run(typing_ahead.measure(url, texts, 0.3, 0))
    assert found["typing: answers that differ"] == 0
    assert found["typing: tokens found"] > 0.7 * found["typing: prompt tokens"]
    assert len(found["typing: ratios"]) == 2
