"""The eval command, with a runtime that is close to its source."""

import json

import pytest
import torch

from optkit.cli import eval as eval_module
from optkit.cli import main
from optkit.quality import windows


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
    monkeypatch.setattr(eval_module, "_runtime", lambda artifact: Noisy(0.1))
    monkeypatch.setattr(eval_module, "_reference", lambda baseline, tell: (Noisy(0.0), tmp_path))
    monkeypatch.setattr(eval_module, "_tokenizer", lambda artifact, source: None)
    cut = windows([i % 50 for i in range(4096)], 512, 4)
    monkeypatch.setattr(
        "optkit.quality.evaluation_windows", lambda tokenizer, tokens, length: cut if length == 512 else None
    )


def test_json(capsys):
    assert main.run(["eval", "artifact", "--baseline", "model", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["windows"] == 4 and data["tokens"] == 4 * 511
    assert 0 < data["kl_mean"]["value"] < 0.01
    assert data["top1_agreement"]["value"] == 1


def test_table(capsys):
    assert main.run(["eval", "artifact", "--baseline", "model"]) == 0
    out = capsys.readouterr().out
    assert "2044 in 4 windows" in out and "top-1 agreement, %" in out and "±" in out


def test_the_baseline_is_required():
    assert main.run(["eval", "artifact"]) == 2


def test_more_tokens_than_there_are_is_a_user_error(monkeypatch):
    def short(tokenizer, tokens, length):
        raise ValueError("too short")

    monkeypatch.setattr("optkit.quality.evaluation_windows", short)
    assert main.run(["eval", "artifact", "--baseline", "model", "--tokens", "900000"]) == 2
