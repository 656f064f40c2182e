"""The spec of sampling against a search over all tokens, a row at a time, in plain Python."""

from __future__ import annotations

import math
import random

import pytest
import torch

from optkit.kernels.reference_sampling import sample


def chosen(logits: list[float], temperature: float, k: int, p: float, m: float, uniform: float) -> int:
    """A token by the definitions: min_p, then top_k, then top_p, then the inverse of the distribution function."""
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    probs = {token: weight / sum(weights) for token, weight in enumerate(weights)}
    kept = {token: q for token, q in probs.items() if q >= m * max(probs.values())}
    best = sorted(kept, key=lambda token: -kept[token])[: k or len(kept)]
    nucleus, mass, total = [], 0.0, sum(kept[token] for token in best)
    for token in best:
        if p >= 1 or mass < p * total:
            nucleus.append(token)
        mass += kept[token]
    at = uniform * sum(kept[token] for token in nucleus)
    for token in sorted(nucleus):
        at -= kept[token]
        if at < 0:
            return token
    return max(nucleus)


@pytest.mark.parametrize(
    ("k", "p", "m"), [(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.2), (5, 0.8, 0.05)]
)
def test_sample_draws_the_token_of_the_definitions(k: int, p: float, m: float) -> None:
    dice, rows = random.Random(1), 64
    logits = [[dice.gauss(0, 2) for _ in range(12)] for _ in range(rows)]
    uniform = [dice.random() for _ in range(rows)]
    found = sample(
        torch.tensor(logits), torch.full((rows,), 0.8), torch.full((rows,), k, dtype=torch.int32),
        torch.full((rows,), p), torch.full((rows,), m), torch.tensor(uniform, dtype=torch.float64),
    )  # fmt: skip
    expected = [chosen(row, 0.8, k, p, m, u) for row, u in zip(logits, uniform, strict=True)]
    assert found.tolist() == expected and len(set(expected)) > 2


def test_sample_is_greedy_without_temperature_and_minus_one_without_a_largest_logit() -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[0.0, 2.0, 2.0], [nan, 1.0, 0.0], [-inf, -inf, -inf], [0.0, inf, 1.0]])
    ones, none = torch.ones(4), torch.zeros(4)
    found = sample(logits, none, none.int(), ones, none, torch.full((4,), 0.5, dtype=torch.float64))
    assert found.tolist() == [1, -1, -1, -1]
