"""Sampling defaults of the model, below the fields of a request."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from optkit.serve.app import create_app
from optkit.serve.openai.defaults import SamplingDefaults, read_defaults
from tests.support.http_calls import CHAT, COMPLETIONS, HELLO
from tests.support.serve_fakes import FakeEngine, post, settings
from tests.support.tiny_tokenizer import tiny_tokenizer

RECOMMENDED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}


def write(directory: Path, content: Any) -> Path:
    (directory / "generation_config.json").write_text(
        content if isinstance(content, str) else json.dumps(content)
    )
    return directory


def test_fields_are_read_and_others_are_not(tmp_path: Path) -> None:
    found = read_defaults(write(tmp_path, {**RECOMMENDED, "eos_token_id": 2, "do_sample": True}))
    assert found.given == RECOMMENDED


@pytest.mark.parametrize("content", ["{", "[1]", "7"])
def test_broken_file_gives_no_defaults(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_defaults(write(tmp_path, content)).given == {}
    assert "not a JSON object" in caplog.text


def test_absent_file_gives_no_defaults(tmp_path: Path) -> None:
    assert read_defaults(tmp_path).given == {}


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", 3.0), ("top_p", 0), ("top_k", "many"), ("repetition_penalty", -1)]
)
def test_value_out_of_bounds_is_left_out_and_told(
    name: str, value: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "optkit.serve")
    assert read_defaults(write(tmp_path, {"min_p": 0.1, name: value})).given == {"min_p": 0.1}
    assert name in caplog.text


def sampling(defaults: SamplingDefaults, path: str = CHAT, **fields: Any) -> Any:
    engine = FakeEngine()
    app = create_app(engine, tiny_tokenizer(), settings(), defaults=defaults)
    body = {**(HELLO if path == CHAT else {"prompt": "Hello"}), **fields}
    assert post(app, path, body).status_code == 200
    return engine.requests[0].sampling


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_request_without_fields_has_the_defaults(path: str) -> None:
    found = sampling(SamplingDefaults(**RECOMMENDED, max_new_tokens=33), path)
    assert {name: getattr(found, name) for name in RECOMMENDED} == RECOMMENDED
    assert found.max_tokens == 33


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_fields_of_a_request_come_first(path: str) -> None:
    own = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    found = sampling(SamplingDefaults(**RECOMMENDED, max_new_tokens=33), path, **own, max_tokens=5)
    assert {name: getattr(found, name) for name in own} == own
    assert found.max_tokens == 5


def test_default_length_is_bounded_by_the_context() -> None:
    assert sampling(SamplingDefaults(max_new_tokens=100_000)).max_tokens < 512
