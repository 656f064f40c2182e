"""Fake engines in the place of an artifact's."""

from __future__ import annotations

from typing import Any

import pytest

from bench.long import _answers, tree
from optkit.runtime.sampling.tree_speculator import TreeSpeculator
from tests.support.fakes import fake_engine
from tests.support.tiny_tokenizer import tiny_tokenizer


def opened(artifact: str, speculative_model: str = "none", **options: Any) -> Any:
    """An engine with the room for the prompts, with trees of guesses unless there are none."""
    sizes = {"vocab_size": 302, "max_model_len": 4096, "num_blocks": 1200, "max_num_batched_tokens": 2048}
    engine = fake_engine(options=sizes)
    if speculative_model != "none":
        cost = engine.scheduler.cost
        engine.scheduler.proposer = TreeSpeculator(cost, 8, recycles=True, max_cached_requests=8)
    return engine


@pytest.fixture
def faked_artifact(monkeypatch: pytest.MonkeyPatch) -> None:
    """``opened`` for any artifact, with the tiny tokenizer."""

    def start(self: _answers.Chats, artifact: str) -> None:
        self.tokenizer = tiny_tokenizer()

    monkeypatch.setattr(_answers.Chats, "__init__", start)
    for module in (_answers, tree):
        monkeypatch.setattr(module, "open_engine", opened)
