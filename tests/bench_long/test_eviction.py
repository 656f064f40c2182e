"""KeyDiff's choice of tokens, against the definition, and a reader with all tokens against plain transformers."""

from __future__ import annotations

from pathlib import Path

import torch

from bench.long import eviction
from optkit.evaluation.long.document import Question
from tests.support.architectures import tiny_model


def pairs(length: int = 60) -> eviction.Pairs:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(2, length, 8, generator=generator), torch.randn(2, length, 8, generator=generator))
        for _ in range(3)
    ]


def test_scores_are_less_the_cosine_to_the_mean_direction() -> None:
    keys = pairs()[0][0]
    mean = torch.stack([key / key.norm() for key in keys[1]]).mean(0)
    wanted = -(keys[1, 7] @ mean) / (keys[1, 7].norm() * mean.norm())
    torch.testing.assert_close(eviction.key_difference(keys)[1, 7], wanted)


def test_uniform_scores_are_the_same_in_all_layers_and_heads() -> None:
    found = eviction.uniform(pairs())
    apart = eviction.per_head(pairs())
    assert all(torch.equal(row, found[0][0]) for score in found for row in score)
    torch.testing.assert_close(found[0][0], torch.stack(apart).sum((0, 1)))


def test_kept_tokens_stay_in_order_with_sinks_and_the_last_ones() -> None:
    before = pairs(100)
    scores = [torch.arange(100.0).flip(0).expand(2, -1) for _ in before]
    kept = eviction.evicted(before, scores, 0.5)
    wanted = [*range(18), *range(68, 100)]
    for (keys, values), (left_keys, left_values) in zip(before, kept, strict=True):
        assert torch.equal(left_keys, keys[:, wanted]) and torch.equal(left_values, values[:, wanted])


def test_an_answer_after_all_tokens_is_that_of_the_whole_text(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    context, question = list(range(3, 60)), Question((5, 6, 7), (8, 9))
    reader = eviction.Reader(str(tmp_path))
    _, found = reader.answer(reader.read(context), len(context), question)
    with torch.no_grad():
        scores = model(torch.tensor([[*context, 5, 6, 7, 8]])).logits[0].log_softmax(-1)
    assert abs(found - float((scores[-2, 8] + scores[-1, 9]) / 2)) < 1e-4
