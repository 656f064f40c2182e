"""Prompts, log-probabilities and ratios of the figures of prefill policies."""

from __future__ import annotations

import torch

from bench.long._prefill import Pair, Question, answer_logprob, in_turn, kl, logprobs, ratios
from optkit.lowering.lower import lower
from tests.support.architectures import tiny_model
from tests.support.graphs import captured, random_ids
from tests.support.target import TARGET

(IDS,) = random_ids([90])


def test_logprobs_are_those_of_transformers_whatever_the_step() -> None:
    with torch.no_grad():
        expected = tiny_model("llama").eval()(IDS[None]).logits[0].log_softmax(-1)
    model = lower(captured("llama"), TARGET)
    for step in (7, 64, 1000):
        torch.testing.assert_close(
            logprobs(model, IDS.tolist(), 5, step=step), expected[-5:], atol=1e-3, rtol=1e-3
        )


def test_the_log_probability_of_an_answer_at_kept_positions() -> None:
    prompt, answer, kept = IDS[:80].tolist(), IDS[80:84].tolist(), [*range(10), *range(40, 80)]
    ids = torch.tensor([prompt[at] for at in kept] + answer)
    with torch.no_grad():
        places, seen = torch.tensor([[*kept, *range(80, 84)]]), torch.ones(1, len(ids))
        rows = (
            tiny_model("llama")
            .eval()(ids[None], attention_mask=seen, position_ids=places)
            .logits[0]
            .log_softmax(-1)
        )
    expected = sum(float(rows[len(kept) - 1 + i, token]) for i, token in enumerate(answer))
    found, first = answer_logprob(lower(captured("llama"), TARGET), Question(prompt, answer), kept)
    assert abs(found - expected) < 1e-2
    torch.testing.assert_close(first, rows[len(kept) - 1], atol=1e-3, rtol=1e-3)
    assert float(kl(rows[0], rows[0])) == 0.0 and float(kl(rows[0], rows[1])) > 0


def test_ratios_are_medians_of_rounds_in_changing_order() -> None:
    order: list[str] = []
    pairs = in_turn(lambda n: order.append(f"base {n}"), lambda n: order.append(f"other {n}"), 3)
    assert order == ["base 0", "other 0", "other 1", "base 1", "base 2", "other 2"] and len(pairs) == 3
    found = ratios([Pair((2.0, 2.0), (1.0, 1.0)), Pair((4.0, 1.0), (1.0, 0.5)), Pair((2.0, 1.0), (2.0, 1.0))])
    assert found["ratio"] == 0.5 and found["best_ratio"] == 0.5 and found["cpu_ratio"] == 0.5
