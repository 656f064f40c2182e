"""The native sampler against the spec, on every instruction set: ties, ends of rows, rows without a distribution."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optkit.kernels import reference
from optkit.kernels.cpu import native, sampling

pytestmark = pytest.mark.skipif(not native.available(), reason="no native kernels")
WIDTHS = (1, 15, 17, 257, 1040, 5000)  # around the vectors, the partial sums and the search for the largest
FILTERS = (
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 0.9, 0.0),
    (1.0, 3, 1.0, 0.0),
    (1.0, 0, 1.0, 0.1),
    (1.3, 40, 0.95, 0.02),
    (2.0, 1_000_000, 0.5, 0.0),
    (0.3, -1, 0.01, 0.0),
)


@pytest.fixture(params=native.usable_isas() if native.available() else [])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    native.set_isa(request.param)
    yield request.param
    native.set_isa(None)


def chosen(logits: Tensor, parameters: tuple[float, int, float, float], uniform: list[float]) -> list[int]:
    """The native tokens of the rows of ``logits``, all with the same parameters."""
    rows = [
        sampling.row(row, len(row), *parameters, u) for row, u in zip(logits.numpy(), uniform, strict=True)
    ]
    return sampling.choose(rows, logits.shape[1])


def by_spec(logits: Tensor, parameters: tuple[float, int, float, float], uniform: list[float]) -> list[int]:
    """The tokens of the reference, in float64."""
    temperature, top_k, top_p, min_p = (torch.full((len(logits),), value) for value in parameters)
    numbers = torch.tensor(uniform, dtype=torch.float64)
    return reference.sample(logits, temperature, top_k.int(), top_p, min_p, numbers).tolist()


@pytest.mark.parametrize("parameters", FILTERS, ids=str)
def test_sample_is_the_spec_when_logits_are_peaked_or_flat(
    isa: str, parameters: tuple[float, int, float, float]
) -> None:
    dice = torch.Generator().manual_seed(7)
    found, wanted = [], []
    for width, scale in itertools.product(WIDTHS, (0.5, 2.0, 6.0)):
        logits = scale * torch.randn(4, width, generator=dice)
        uniform = torch.rand(4, dtype=torch.float64, generator=dice).tolist()
        found += chosen(logits, parameters, uniform)
        wanted += by_spec(logits, parameters, uniform)
    assert found == wanted
    assert len(set(found)) > 10


def bit_mask(allowed: Tensor) -> np.ndarray:
    """The bits of the boolean vector ``allowed`` [V] as [ceil(V / 32)] uint32."""
    bits = np.packbits(allowed.numpy(), bitorder="little")
    return np.pad(bits, (0, -len(bits) % 4)).view(np.uint32)


@pytest.mark.parametrize("share", [0.001, 0.3, 0.95])
@pytest.mark.parametrize("parameters", FILTERS, ids=str)
def test_a_mask_of_tokens_is_the_spec_with_minus_infinity_for_the_others(
    isa: str, parameters: tuple[float, int, float, float], share: float
) -> None:
    dice = torch.Generator().manual_seed(11)
    found, wanted = [], []
    for width in (*WIDTHS, 49152):
        logits = 2.0 * torch.randn(3, width, generator=dice)
        logits[0, 0] = 100.0  # a favourite, which is not allowed
        allowed = torch.rand(3, width, generator=dice) < share
        allowed[:, width - 1], allowed[0, 0] = True, width == 1
        allowed[1, : width // 2], allowed[2, : width // 64 * 32] = False, True  # whole words of one kind
        uniform = torch.rand(3, dtype=torch.float64, generator=dice).tolist()
        masks = [bit_mask(row) for row in allowed]
        rows = [
            sampling.row(row, width, *parameters, u, mask)
            for row, u, mask in zip(logits.numpy(), uniform, masks, strict=True)
        ]
        tokens = sampling.choose(rows, width)
        assert all(allowed[i, token] for i, token in enumerate(tokens))
        found += tokens
        wanted += by_spec(logits.masked_fill(~allowed, -math.inf), parameters, uniform)
    assert found == wanted


def test_a_row_without_an_allowed_number_fails_and_numbers_not_allowed_do_not_count(isa: str) -> None:
    logits = np.array([math.nan, 1.0, -math.inf, 3.0], dtype=np.float32)
    masks = ([0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0], [1, 1, 0, 0])
    kept = [bit_mask(torch.tensor(mask, dtype=torch.bool)) for mask in masks]
    rows = [sampling.row(logits, 4, 1.0, 0, 1.0, 0.0, 0.5, mask) for mask in kept]
    assert sampling.choose(rows, 4) == [1, *[sampling.BAD_LOGITS] * 3]


@pytest.mark.parametrize("parameters", FILTERS[1:], ids=str)
def test_draws_have_the_probabilities_of_float64_when_numbers_are_spread_evenly(
    parameters: tuple[float, int, float, float],
) -> None:
    """Each token is drawn as often as its probability says, to one draw at each edge."""
    draws, width = 3000, 24
    logits = 1.5 * torch.randn(width, generator=torch.Generator().manual_seed(3))
    tokens = chosen(logits.expand(draws, -1), parameters, [(i + 0.5) / draws for i in range(draws)])
    counts = torch.bincount(torch.tensor(tokens), minlength=width)
    assert ((counts - draws * probabilities(logits, *parameters)).abs() <= 1.01).all()


def probabilities(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The distribution [V] float64 by definition: min_p, then top_k, then top_p, over a sorted list."""
    probs = (logits.double() / temperature).softmax(0)
    best = sorted(range(len(probs)), key=lambda token: -float(probs[token]))
    kept = [token for token in best if probs[token] >= min_p * probs.max()]
    kept = kept[:top_k] if top_k > 0 else kept
    total, mass, nucleus = float(probs[kept].sum()), 0.0, []
    for token in kept:
        if top_p >= 1.0 or mass < top_p * total or not nucleus:
            nucleus.append(token)
        mass += float(probs[token])
    out = torch.zeros_like(probs)
    out[nucleus] = probs[nucleus] / probs[nucleus].sum()
    return out


@settings(deadline=None)
@given(
    weights=st.lists(st.integers(0, 6), min_size=1, max_size=60).filter(any),
    top_k=st.integers(0, 70),
    top_p=st.floats(0.01, 1.0),
    uniform=st.floats(0.0, 1.0, exclude_max=True),
)
def test_tokens_tied_at_the_edge_of_a_filter_all_stay(
    weights: list[int], top_k: int, top_p: float, uniform: float
) -> None:
    """Small whole weights, so that there are ties: the drawn token is at least as likely as the filter's edge."""
    logits = torch.tensor([[float(w) for w in weights]]).log()
    (token,) = chosen(logits, (1.0, top_k, top_p, 0.0), [uniform])
    ranked = sorted((w for w in weights if w), reverse=True)
    ranked = [w for w in ranked if w >= ranked[min(top_k or len(ranked), len(ranked)) - 1]]
    before = [sum(ranked[:i]) for i in range(len(ranked))]
    slack = 1e-5 * sum(ranked)
    edges = [w for w, mass in zip(ranked, before, strict=True) if mass < top_p * sum(ranked) + slack]
    assert weights[token] >= edges[-1]


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-53])
def test_first_and_last_possible_token_when_the_number_is_at_its_ends(isa: str, uniform: float) -> None:
    logits = torch.full((1, 1000), -math.inf)
    logits[0, [3, 400, 901]] = torch.tensor([0.0, 1.0, -1.0])
    assert chosen(logits, FILTERS[1], [uniform]) == [3 if uniform == 0.0 else 901]


def test_greedy_is_the_first_of_equals(isa: str) -> None:
    logits = torch.zeros(2, 3000)
    logits[0, [2999, 1500, 2047]] = 1.0
    assert chosen(logits, FILTERS[0], [0.5, 0.5]) == [1500, 0]


@pytest.mark.parametrize("parameters", [FILTERS[0], FILTERS[1], FILTERS[5]], ids=str)
@pytest.mark.parametrize("width", [3, 40, 2000])
def test_rows_that_are_no_numbers_fail_and_others_do_not(
    isa: str, parameters: tuple[float, int, float, float], width: int
) -> None:
    logits = torch.randn(5, width, generator=torch.Generator().manual_seed(1))
    logits[0, width - 1] = math.nan
    logits[1, 0] = math.nan
    logits[2, width // 2] = math.inf
    logits[3] = -math.inf
    tokens = chosen(logits, parameters, [0.3] * 5)
    assert tokens[:4] == [sampling.BAD_LOGITS] * 4
    assert tokens[4:] == by_spec(logits[4:], parameters, [0.3])


@pytest.mark.parametrize("parameters", [(math.nan, 0, 1.0, 0.0), (math.nan, 5, 0.5, 0.1), (1.0, 0, 1.0, 2.0)])
def test_parameters_without_a_distribution_are_reported(parameters: tuple[float, int, float, float]) -> None:
    assert chosen(torch.randn(1, 300), parameters, [0.5]) == [sampling.BAD_PARAMETERS]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_token_depends_on_nothing_but_its_row(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "threads", lambda: threads)
    logits = torch.randn(9, 700, generator=torch.Generator().manual_seed(2))
    uniform = torch.rand(9, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).tolist()
    together = chosen(logits, FILTERS[5], uniform)
    order = [8, 0, 4]
    assert chosen(logits[order], FILTERS[5], [uniform[i] for i in order]) == [together[i] for i in order]


def test_row_refuses_what_native_code_would_misread() -> None:
    right = np.zeros(8, np.float32)
    shifted = np.frombuffer(bytes(33), np.uint8)[1:].view(np.float32)
    for wrong in (
        right.astype(np.float64),
        right.astype(">f4"),
        right.view(np.int32),
        np.zeros(16, np.float32)[::2],
        right[::-1],
        right.reshape(2, 4),
        right[:7],
        np.broadcast_to(np.float32(0.0), 8),
        shifted,
        torch.zeros(8),
        right.tolist(),
    ):
        with pytest.raises(ValueError, match="native kernel"):
            sampling.row(wrong, 8, 1.0, 0, 1.0, 0.0, 0.5)
    for mask in (
        np.zeros(1, np.int32),
        np.zeros(2, np.uint32),
        np.zeros((1, 1), np.uint32),
        np.zeros(1, ">u4"),
        torch.zeros(1),
    ):
        with pytest.raises(ValueError, match="a bit for each token"):
            sampling.row(right, 8, 1.0, 0, 1.0, 0.0, 0.5, mask)
    with pytest.raises(struct.error):
        sampling.row(right, 8, 1.0, 2**40, 1.0, 0.0, 0.5)


@given(
    seed=st.integers(0, 2**32 - 1),
    width=st.sampled_from((*WIDTHS, 3, 256, 1024)),
    most=st.integers(1, 9),
    levels=st.sampled_from((3, 50, 1 << 20)),
    excluded=st.sampled_from((0.0, 0.5, 0.999)),
)
@settings(max_examples=60, deadline=None)
def test_likeliest_are_the_first_of_a_stable_sort(
    seed: int, width: int, most: int, levels: int, excluded: float
) -> None:
    dice = np.random.default_rng(seed)
    logits = dice.integers(0, levels, (3, width)).astype(np.float32)  # few levels: many ties
    logits[dice.random(logits.shape) < excluded] = -math.inf
    rows = [2, 0]
    for isa in native.usable_isas():
        native.set_isa(isa)
        try:
            found = sampling.likeliest(logits, rows, most).tolist()
        finally:
            native.set_isa(None)
        for row, tokens in zip(rows, found, strict=True):
            order = np.argsort(-logits[row], kind="stable")
            expected = [token for token in order[:most].tolist() if logits[row, token] > -math.inf]
            assert tokens == expected + [-1] * (most - len(expected)), isa


def test_likeliest_survive_logits_that_are_no_numbers(isa: str) -> None:
    dice = np.random.default_rng(1)
    logits = dice.standard_normal((1, 5000), dtype=np.float32)
    logits[dice.random(logits.shape) < 0.5] = math.nan
    found = sampling.likeliest(logits, [0], 4)[0]
    assert all(token == -1 or 0 <= token < 5000 for token in found)


def test_likeliest_refuse_rows_beyond_the_logits() -> None:
    logits = np.zeros((2, 8), np.float32)
    for rows in ([2], [-1]):
        with pytest.raises(ValueError, match="rows must be of the 2"):
            sampling.likeliest(logits, rows, 4)
    with pytest.raises(ValueError, match="dense table"):
        sampling.likeliest(logits[:, ::2], [0], 4)
