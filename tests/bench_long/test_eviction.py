"""KeyDiff's choice of tokens, against the definition, and answers behind a part of the KV, against transformers."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.long import eviction
from bench.long.eviction import Row
from optkit.evaluation.long.document import Document, Question
from tests.support.architectures import tiny_model

CONTEXT, QUESTION = tuple(range(3, 103)), Question((5, 6, 7), (8, 9))


def pairs(length: int = 60) -> eviction.Pairs:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(2, length, 8, generator=generator), torch.randn(2, length, 8, generator=generator))
        for _ in range(3)
    ]


def test_scores_are_the_negative_cosine_to_the_mean_direction() -> None:
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


@pytest.fixture
def model(tmp_path: Path) -> Any:
    made = tiny_model("llama")
    made.save_pretrained(tmp_path)
    return made


def masked_logprobs(model: Any, seen: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the answer in one pass over the text; its last part sees ``seen`` of the context."""
    ids = torch.tensor([[*CONTEXT, *QUESTION.prompt, *QUESTION.answer[:-1]]])
    mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    mask[len(CONTEXT) :, : len(CONTEXT)] = seen
    bias = torch.where(mask, 0.0, -torch.inf)[None, None]
    with torch.no_grad():
        rows = model(ids, attention_mask=bias, use_cache=False).logits[0, -2:].log_softmax(-1)
    return rows[[0, 1], list(QUESTION.answer)].double()


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_an_answer_behind_a_part_is_that_of_a_mask_over_the_rest(
    model: Any, tmp_path: Path, share: float
) -> None:
    reader = eviction.Reader.load(tmp_path)
    whole, full = reader.read(Document("needle", 105, CONTEXT, (QUESTION,)))
    scores = eviction.uniform(whole)
    seen = torch.zeros(len(CONTEXT), dtype=torch.bool)
    seen[eviction.kept_places(scores[0], share)[0]] = True
    assert int(seen.sum()) == round(share * len(CONTEXT))
    found = reader.answer_behind(eviction.evicted(whole, scores, share), len(CONTEXT), QUESTION)
    torch.testing.assert_close(found.logprobs, masked_logprobs(model, seen), atol=1e-4, rtol=1e-4)
    everything = masked_logprobs(model, torch.ones_like(seen))
    torch.testing.assert_close(full[0].logprobs, everything, atol=1e-4, rtol=1e-4)
    assert bool((everything - found.logprobs).abs().max() > 1e-3) is (share < 1)


def test_the_error_of_a_ratio_is_that_of_leaving_documents_out() -> None:
    """The jackknife is the second method; documents are of equal size, so both agree closely."""
    generator = torch.Generator().manual_seed(5)
    documents = [number for number in range(40) for _ in range(3)]
    wholes = (2 + torch.rand(120, generator=generator)).tolist()
    parts = [whole * (0.6 + 0.2 * ((7 * d) % 5) / 5) for whole, d in zip(wholes, documents, strict=True)]
    found = eviction.ratio(parts, wholes, documents)
    assert found.value == pytest.approx(sum(parts) / sum(wholes))
    left_out = []
    for document in range(40):
        kept = [i for i, each in enumerate(documents) if each != document]
        left_out.append(sum(parts[i] for i in kept) / sum(wholes[i] for i in kept))
    jackknife = math.sqrt(39 / 40 * sum((each - statistics.fmean(left_out)) ** 2 for each in left_out))
    assert found.stderr == pytest.approx(jackknife, rel=0.02)
    assert math.isnan(eviction.ratio([1.0], [0.0], [0]).value)


def test_tasks_without_a_gain_are_left_out_and_new_exact_answers_count() -> None:
    base = {"length": 100, "method": "window", "share": 0.5}
    rows = [
        Row(0, "needle", gain=2.0, loss=0.5, right=True, left=False, **base),
        Row(1, "needle", gain=4.0, loss=1.0, right=True, left=True, **base),
        Row(1, "needle", gain=0.5, loss=0.0, right=False, left=True, **base),
        Row(2, "qa", gain=0.9, loss=0.9, right=True, left=False, **base),
    ]
    rows = eviction.with_signal(rows)
    assert {row.task for row in rows} == {"needle"}
    assert eviction.gain_kept(rows).value == pytest.approx(5.0 / 6.5)
    assert eviction.exact_kept(rows).value == 1.0  # one lost, one won
