"""The eval command, with a runtime that is close to its source."""

import json

import pytest
import torch

from optkit.cli import eval as eval_module
from optkit.cli import main
from optkit.evaluation.quality import RuntimeLogits, windows
from optkit.lowering.lower import lower
from tests.support.graphs import apply, captured


class Noisy:
    """Logits that favour the true next token, plus noise."""

    max_length = 600

    def __init__(self, noise):
        self.noise = noise

    def logits(self, token_windows):
        generator = torch.Generator().manual_seed(0)
        for window in token_windows:
            base = torch.nn.functional.one_hot(torch.tensor([*window[1:], 0]), 50).float() * 4
            yield base + self.noise * torch.randn(base.shape, generator=generator)


@pytest.fixture(autouse=True)
def fakes(monkeypatch, tmp_path):
    noise = {"artifact": 0.1, "model": 0.0}
    monkeypatch.setattr(eval_module, "_open", lambda model, progress: (Noisy(noise[model]), tmp_path))
    monkeypatch.setattr(eval_module, "_tokenizer", lambda artifact, source: None)
    cut = windows([i % 50 for i in range(4096)], 512, 4)
    monkeypatch.setattr(
        "optkit.evaluation.quality.evaluation_windows",
        lambda tokenizer, tokens, length, text: cut if length == 512 else None,
    )


def test_eval_prints_the_report_as_json(capsys):
    assert main.run(["eval", "artifact", "--baseline", "model", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["windows"] == 4 and data["tokens"] == 4 * 511
    assert 0 < data["kl_mean"]["value"] < 0.01
    assert data["top1_agreement"]["value"] == 1


def test_eval_prints_a_table_of_metrics(capsys):
    assert main.run(["eval", "artifact", "--baseline", "model"]) == 0
    out = capsys.readouterr().out
    assert "2044 in 4 windows" in out and "top-1 agreement, %" in out and "±" in out


def test_eval_prints_perplexity_when_there_is_no_reference(capsys):
    assert main.run(["eval", "artifact", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["tokens"] == 4 * 511 and 1 < data["ppl"]["value"] < 50
    assert main.run(["eval", "artifact", "--against", "model", "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert compared["ppl"]["value"] == pytest.approx(data["ppl"]["value"])


def test_eval_exits_with_2_when_the_text_is_unreadable(tmp_path, capsys):
    (tmp_path / "text").write_bytes(b"\xff\xfe\xff")
    assert main.run(["eval", "artifact", "--text", str(tmp_path / "text")]) == 2
    assert main.run(["eval", "artifact", "--text", str(tmp_path / "none")]) == 2


def test_windows_raises_a_user_error_when_the_text_is_too_short(monkeypatch):
    def short(tokenizer, tokens, length, text):
        raise ValueError("too short")

    monkeypatch.setattr("optkit.evaluation.quality.evaluation_windows", short)
    assert main.run(["eval", "artifact", "--baseline", "model", "--tokens", "900000"]) == 2


def test_eval_reports_each_variant_when_layers_have_two(monkeypatch, capsys, tmp_path):
    graph = captured("llama")
    apply(graph, "rtn", scheme="W4A16", group_size=32, max_tokens=4)
    models = {"artifact": graph, "model": captured("llama")}
    monkeypatch.setattr(
        eval_module, "_open", lambda model, progress: (RuntimeLogits(lower(models[model])), tmp_path)
    )
    cut = windows([(7 * i) % 128 for i in range(96)], 48)
    monkeypatch.setattr("optkit.evaluation.quality.evaluation_windows", lambda *_: cut)
    assert main.run(["eval", "artifact", "--against", "model", "--json"]) == 0
    variants = json.loads(capsys.readouterr().out)["forms"]
    assert variants["up to 4 tokens"]["kl_mean"]["value"] > 1e-3
    assert variants["more than 4 tokens"]["kl_mean"]["value"] < 1e-6
    assert main.run(["eval", "artifact", "--against", "model"]) == 0
    assert "steps of up to 4 tokens" in capsys.readouterr().out
