"""A trial finds a right model, a wrong graph, wrong tokens, and a refusal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.coverage import trial as trials
from bench.coverage.models import tiny_model
from bench.coverage.trial import LENGTHS, REFUSED, RIGHT, WRONG, Eager, Outcome, Wrong, compare, serve, trial
from optkit.capture import boundary
from optkit.errors import UnsupportedModel
from optkit.graph.ir import Graph
from optkit.kernels import reference
from optkit.lowering.lower import lower


def two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of two layers: an export takes a second a layer."""
    plain = trials.tiny_model

    def small(name: str, attention: str) -> Any:
        from bench.coverage.models import tiny_config

        config = tiny_config(name)
        config.num_hidden_layers = 2
        return plain(name, attention, config)

    monkeypatch.setattr(trials, "tiny_model", small)


def damaged(monkeypatch: pytest.MonkeyPatch, damage: Callable[[Graph], None]) -> None:
    """Capture graphs with ``damage``, unseen by the check of the capture."""
    plain = trials.capture

    def capture(model: Any) -> Graph:
        graph = plain(model, check=False)
        damage(graph)
        return graph

    monkeypatch.setattr(trials, "capture", capture)


def lose_window(graph: Graph) -> None:
    node = next(iter(graph.calls(reference.attention)))
    node.kwargs = {**node.kwargs, "window": 0}
    specs = tuple(replace(spec, window=0) for spec in graph.meta.kv_specs)
    graph.meta = graph.meta.with_kv_specs(specs)


def test_trial_is_right_when_the_graph_computes_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    two_layers(monkeypatch)
    outcome = trial("qwen3_moe")
    assert (outcome.state, outcome.reason) == (RIGHT, "")
    assert 0 < outcome.capture_seconds < outcome.seconds


def test_trial_is_wrong_when_a_window_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    two_layers(monkeypatch)
    damaged(monkeypatch, lose_window)
    outcome = trial("mistral")
    assert outcome.state == WRONG and "in one call" in outcome.reason


def test_trial_is_refused_when_capture_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(model: Any) -> Graph:
        raise UnsupportedModel("it has an op of its own", where="llama")

    monkeypatch.setattr(trials, "capture", capture)
    outcome = trial("llama")
    assert (outcome.state, outcome.reason) == (REFUSED, "it has an op of its own")


def test_serve_finds_wrong_tokens_when_the_model_is_another() -> None:
    from optkit.capture import capture

    boundary.register()
    model = tiny_model("gpt2", boundary.NAME, short("gpt2"))
    executable = lower(capture(model, check=False))
    prompts = [trials.ids(length, 128) for length in LENGTHS]
    serve(executable, Eager(tiny_model("gpt2", "eager", short("gpt2"))), prompts)
    other = tiny_model("gpt2", "eager", short("gpt2"))
    with torch.no_grad():
        other.lm_head.weight[3:60] *= -1
    with pytest.raises(Wrong, match="preemption"):
        serve(executable, Eager(other), prompts)


def short(name: str) -> Any:
    from bench.coverage.models import tiny_config

    config = tiny_config(name)
    config.num_hidden_layers = 1
    return config


def test_compare_refuses_when_a_logit_is_not_a_number() -> None:
    right = torch.ones(3, 4)
    compare("", right.clone(), right)
    with pytest.raises(Wrong):
        compare("", right.clone().index_fill_(0, torch.tensor([1]), float("nan")), right)


def test_outcome_is_the_same_when_read_back() -> None:
    outcome = Outcome(WRONG, "a reason", 1.23, 4.56)
    assert Outcome(**outcome.as_dict()) == Outcome(WRONG, "a reason", 1.2, 4.6)
