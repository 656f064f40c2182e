"""Sampling on the device: the spec against the runtime's probabilities, and the kernel against the spec."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optkit.kernels import reference
from optkit.kernels.triton import sampling
from optkit.runtime.sampling.sampler import distribution
from optkit.runtime.types import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def parameters(
    rows: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[Tensor, ...]:
    """The same parameters for all rows, with numbers spread over [0, 1)."""
    return (
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        (torch.arange(rows, dtype=torch.float64) + 0.5) / rows,
    )


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.7, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_draws_have_the_runtimes_probabilities(filters: dict[str, float]) -> None:
    """Numbers spread evenly over [0, 1) hit each token as often as its probability says, to one draw at each edge."""
    draws, tokens = 4_000, 24
    torch.manual_seed(3)
    logits = torch.randn(tokens) * 1.5
    expected = torch.from_numpy(distribution(logits.numpy(), SamplingParams(max_tokens=1, **filters)))
    drawn = reference.sample(logits.expand(draws, -1), *parameters(draws, **filters))
    counts = torch.bincount(drawn, minlength=tokens)
    assert ((counts - expected / expected.sum() * draws).abs() <= 1.01).all()
    assert not counts[expected == 0].any()


def random_parameters(rows: int) -> tuple[Tensor, ...]:
    """Some of everything, each row its own."""

    def some(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
        picked = torch.randint(len(values), (rows,))
        return torch.tensor(values, dtype=dtype)[picked]

    return (
        some([0.0, 0.3, 1.0, 2.0]),
        some([0, -1, 1, 3, 40, 10_000], torch.int32),
        some([1.0, 0.9, 0.5, 0.01]),
        some([0.0, 0.05, 0.5]),
        torch.rand(rows, dtype=torch.float64),
    )


@pytest.mark.parametrize(("dtype", "tokens"), [(torch.float32, 5), (torch.float16, 130)])
def test_the_kernel_draws_what_the_spec_draws(
    dtype: torch.dtype, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "CHUNK", 128)
    torch.manual_seed(tokens)
    logits = (torch.randn(3, tokens + 3) * 3).to(dtype)[:, :tokens]
    settings = random_parameters(3)
    assert torch.equal(sampling.sample(logits, *settings), reference.sample(logits, *settings))


def test_without_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "CHUNK", 128)
    torch.manual_seed(0)
    logits = torch.randn(6, 300)
    settings = parameters(6, temperature=0.8)
    settings[0][::3] = 0.0
    tokens = sampling.sample(logits, *settings, filtered=False)
    assert torch.equal(tokens, reference.sample(logits, *settings, filtered=False))
    assert torch.equal(tokens[::3], logits[::3].argmax(-1))


def test_a_draw_does_not_depend_on_its_batch() -> None:
    torch.manual_seed(1)
    logits, settings = torch.randn(3, 50), random_parameters(3)
    together = sampling.sample(logits, *settings)
    order = [2, 0]
    assert torch.equal(sampling.sample(logits[order], *(p[order] for p in settings)), together[order])


@pytest.mark.parametrize("filtered", [False, True])
def test_rows_that_are_no_numbers_give_minus_one(filtered: bool) -> None:
    torch.manual_seed(2)
    logits = torch.randn(6, 40)
    logits[0, 7] = float("nan")
    logits[1, 39] = float("inf")
    logits[2] = float("-inf")
    logits[3, 5:] = float("-inf")
    logits[4, :] = 1.0
    for temperature in (0.0, 1.0):
        settings = parameters(6, temperature, top_k=3 if filtered else 0)
        tokens = sampling.sample(logits, *settings, filtered=filtered)
        assert torch.equal(tokens, reference.sample(logits, *settings, filtered=filtered))
        assert tokens[:3].tolist() == [-1] * 3 and 0 <= tokens[3] < 5
        assert temperature or tokens[4] == 0  # the first of equals
