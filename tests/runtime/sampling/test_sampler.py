"""Sampler: each parameter against its definition, reproducible seeds, and errors that stay in their row."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optkit.runtime.sampling import sampler
from optkit.runtime.sampling.sampler import (
    BAD_LOGITS,
    BAD_ROW,
    NONE_LEFT,
    OUTSIDE_CONSTRAINT,
    distribution,
    draw,
    nucleus,
    penalize,
    sample,
)
from optkit.runtime.specprefill.positions import Positions
from optkit.runtime.types import ConstraintFailed, EngineRequest, Failure, Request, SamplingParams

VOCAB = 50


@pytest.fixture(autouse=True, params=["native", "numpy"])
def sampler_in_use(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test with the native sampler and with NumPy's."""
    if request.param == "numpy":
        monkeypatch.setattr(sampler.native, "available", lambda: False)


def sequence(prompt: list[int] | None = None, output: list[int] | None = None, **params: object) -> Request:
    prompt = prompt or [0]
    sampling = SamplingParams(**{"max_tokens": 100} | params)
    request = EngineRequest(request_id="r", prompt_ids=tuple(prompt), sampling=sampling, arrival=0.0)
    return Request(request, prompt + (output or []))


def random_logits(rows: int = 1, seed: int = 0) -> np.ndarray:
    return 1.5 * np.random.default_rng(seed).standard_normal((rows, VOCAB), dtype=np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities [V] float64 of ``logits`` [V]."""
    weights = np.exp(logits.astype(np.float64))
    return weights / weights.sum()


def support(**params: object) -> set[int]:
    """The tokens that can be drawn."""
    return set(np.flatnonzero(distribution(random_logits()[0], sequence(**params).sampling)).tolist())


def ranked() -> list[tuple[int, float]]:
    probs = softmax(random_logits()[0])
    return [(int(t), float(probs[t])) for t in np.argsort(-probs)]


def test_last_token_of_a_bad_word_is_excluded_after_the_others() -> None:
    logits = random_logits()
    best, second, third = (token for token, _ in ranked()[:3])
    words = ((best,), (7, 8, second))
    for output, wanted in (
        ([], second),
        ([7], second),
        ([7, 8], third),
        ([8, 7, 8], third),
        ([7, 8, 9], second),
    ):
        assert sample(logits, [sequence(output=output, temperature=0.0, bad_words=words)]) == [wanted]
    assert sample(logits, [sequence([7, 8], [], temperature=0.0, bad_words=words)]) == [
        second
    ]  # not the prompt


def test_greedy_rows_take_the_argmax() -> None:
    logits = random_logits(5)
    assert sample(logits, [sequence(temperature=0.0) for _ in range(5)]) == logits.argmax(axis=1).tolist()
    assert sample(logits[:0], []) == []


def test_top_k_keeps_the_k_most_likely() -> None:
    assert support(top_k=3) == {token for token, _ in ranked()[:3]}
    assert len(support(top_k=0)) == len(support(top_k=VOCAB + 1)) == VOCAB


@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.7, 0.95])
@pytest.mark.parametrize("unlikely", [0.0, 0.5, 2.0**-12])
def test_top_p_keeps_the_smallest_nucleus(
    top_p: float, unlikely: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "UNLIKELY", unlikely)
    wanted, mass = set(), 0.0
    for token, p in ranked():
        if wanted and mass >= top_p:
            break
        wanted.add(token)
        mass += p
    assert support(top_p=top_p) == wanted
    assert len(support(top_p=1.0)) == VOCAB


def test_min_p_is_relative_to_the_most_likely() -> None:
    best = ranked()[0][1]
    assert support(min_p=0.02) == {token for token, p in ranked() if p >= 0.02 * best}
    assert 1 < len(support(min_p=0.02)) < VOCAB


def test_filters_combine() -> None:
    assert support(top_k=5, top_p=0.5) <= support(top_k=5) & {token for token, _ in ranked()}
    # top_p counts within what top_k left: half of the best two is the best one
    assert len(support(top_k=2, top_p=0.5)) == 1


def test_temperature_scales_the_logits() -> None:
    logits = random_logits()[0]
    probs = distribution(logits, sequence(temperature=0.5).sampling)
    np.testing.assert_allclose(probs, softmax(logits / 0.5), rtol=1e-12)


def test_draws_follow_the_distribution() -> None:
    with np.errstate(divide="ignore"):
        logits = np.log(np.array([[0.1, 0.2, 0.7, 0.0]], dtype=np.float32))
    draws = Counter(sample(logits, [sequence(output=[1] * n, seed=3)])[0] for n in range(3000))
    assert draws[3] == 0
    for token, p in enumerate([0.1, 0.2, 0.7]):
        assert abs(draws[token] / 3000 - p) < 0.04


def test_unseeded_requests_differ() -> None:
    logits = np.broadcast_to(np.zeros((1, VOCAB), dtype=np.float32), (40, VOCAB))
    assert len(set(sample(logits, [sequence() for _ in range(40)]))) > 1


def test_a_seeded_token_depends_on_nothing_but_its_own_request() -> None:
    logits = random_logits(4)
    requests = [sequence(seed=7, output=[1, 2]), sequence(), sequence(seed=8), sequence(temperature=0.0)]
    alone = sample(logits[:1], requests[:1])[0]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 0]):
        tokens = sample(logits[order], [requests[i] for i in order])
        assert tokens[order.index(0)] == alone


def test_seed_and_position_both_matter() -> None:
    flat = np.zeros((1, VOCAB), dtype=np.float32)
    by_position = {sample(flat, [sequence(seed=1, output=[0] * n)])[0] for n in range(20)}
    by_seed = {sample(flat, [sequence(seed=s)])[0] for s in (-(2**63), -1, 0, 1, 2**64, *range(2, 20))}
    assert len(by_position) > 5 and len(by_seed) > 5


def test_repetition_penalty_covers_prompt_and_output() -> None:
    logits = random_logits()[0]
    out = penalize(logits, sequence([1, 1, 2], [3], repetition_penalty=1.5))
    for token in range(VOCAB):
        x = float(logits[token])
        wanted = (x / 1.5 if x > 0 else x * 1.5) if token in (1, 2, 3) else x
        assert float(out[token]) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("last", "seen"),
    [(-1, {1, 2, 3, 9}), (0, set()), (1, {3}), (2, {2, 3}), (4, {1, 2, 3}), (5, {1, 2, 3, 9})],
)
def test_repetition_penalty_looks_as_far_back_as_asked(last: int, seen: set[int]) -> None:
    """Tokens of the prompt that were left out count as soon as the whole text does."""
    logits = random_logits()[0]
    request = sequence([1, 1, 2], [3], repetition_penalty=1.5, repeat_last_n=last)
    request.positions = Positions.of([0, 1, 3], [1, 1, 9, 2])
    changed = np.flatnonzero(penalize(logits, request) != logits).tolist()
    assert set(changed) == seen


def test_presence_and_frequency_penalties_cover_the_output_only() -> None:
    logits = random_logits()[0]
    out = penalize(logits, sequence([1, 2], [3, 3, 2], presence_penalty=0.5, frequency_penalty=0.25))
    change = {3: -1.0, 2: -0.75}
    for token in range(VOCAB):
        assert float(out[token] - logits[token]) == pytest.approx(change.get(token, 0.0), abs=1e-6)


def test_greedy_honours_penalties() -> None:
    logits = random_logits()
    best, second = np.argsort(-logits[0])[:2].tolist()
    request = sequence(output=[best], temperature=0.0, presence_penalty=100.0)
    before = logits.copy()
    assert sample(logits, [request]) == [second]
    assert np.array_equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_masks_stop_tokens_until_then(temperature: float) -> None:
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, 7] = 100.0
    params = {"min_tokens": 2, "stop_token_ids": (7,), "temperature": temperature}
    assert sample(logits, [sequence(output=[1], **params)]) != [7]
    assert sample(logits, [sequence(output=[1, 1], **params)]) == [7]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "all masked"])
def test_bad_logits_fail_their_row_only(temperature: float, bad: float | str) -> None:
    logits = random_logits(3)
    good = sample(logits, [sequence(temperature=temperature, seed=1) for _ in range(3)])
    if bad == "all masked":
        logits[1] = float("-inf")
    else:
        logits[1, 5] = bad
    tokens = sample(logits, [sequence(temperature=temperature, seed=1) for _ in range(3)])
    assert tokens == [good[0], BAD_LOGITS, good[2]]


def test_an_exception_fails_its_row_only() -> None:
    logits = random_logits(3)
    requests = [
        sequence(seed=1),
        sequence(stop_token_ids=(VOCAB,), min_tokens=1),
        sequence(temperature=float("nan")),
    ]
    first, second, third = sample(logits, requests)
    assert first == sample(logits[:1], requests[:1])[0]
    assert second == third == BAD_ROW


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_excluding_every_token_is_the_requests_own_failure_and_not_a_guess(temperature: float) -> None:
    excluding: list[dict[str, object]] = [
        {"min_tokens": 1, "stop_token_ids": tuple(range(VOCAB))},
        {"allowed_token_ids": (3,), "bad_words": ((3,),)},
    ]
    for params in excluding:
        request = sequence(temperature=temperature, **params)
        assert sample(random_logits(), [request]) == [NONE_LEFT]
        assert sample(np.full((1, VOCAB), np.nan, dtype=np.float32), [request]) == [BAD_LOGITS]


def test_logit_bias_is_added_before_the_choice() -> None:
    logits = random_logits()
    best = int(logits.argmax())
    assert sample(logits, [sequence(temperature=0.0, logit_bias=((best, -100.0),))]) != [best]
    assert sample(logits, [sequence(logit_bias=((7, 100.0),))]) == [7]
    assert sample(logits, [sequence(temperature=0.0, logit_bias=((7, 50.0), (8, 60.0)))]) == [8]
    assert int(logits.argmax()) == best  # other rows read the same array


def test_only_allowed_tokens_are_drawn() -> None:
    allowed = {3, 11, 40}
    drawn = {
        sample(random_logits(), [sequence(allowed_token_ids=tuple(allowed), seed=i)])[0] for i in range(60)
    }
    assert drawn == allowed
    greedy = sequence(temperature=0.0, allowed_token_ids=(5,), logit_bias=((6, 100.0),))
    assert sample(random_logits(), [greedy]) == [5]


@settings(deadline=None)
@given(
    weights=st.lists(st.integers(0, 6), min_size=1, max_size=60).filter(any),
    top_p=st.floats(0.0, 1.0, exclude_max=True),
    unlikely=st.sampled_from([sampler.UNLIKELY, 0.5]),
)
def test_nucleus_is_the_first_tokens_of_a_sorted_list(
    weights: list[int], top_p: float, unlikely: float
) -> None:
    """Small integers, so that there are ties and the sums are exact."""
    probs = np.array(weights, dtype=np.float64)
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    wanted, mass = set(), 0
    for i in order:
        if wanted and mass >= top_p * sum(weights):
            break
        wanted.add(i)
        mass += weights[i]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "UNLIKELY", unlikely)
        kept = nucleus(probs, top_p)
    assert set(np.flatnonzero(kept).tolist()) == {i for i in wanted if weights[i]}
    assert all(kept[i] == probs[i] for i in wanted)
    assert probs.tolist() == weights


@settings(deadline=None)
@given(
    weights=st.lists(st.integers(0, 6), min_size=1, max_size=200).filter(any),
    top_k=st.integers(0, 70),
    top_p=st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_distribution_is_the_one_of_float64_by_definition_when_tokens_tie(
    weights: list[int], top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    """min_p, then top_k with all tokens tied at the edge, then top_p with the first of them; sums by ``math.fsum``."""
    with np.errstate(divide="ignore"):
        logits = np.log(np.array(weights, dtype=np.float32))
    params = sequence(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature).sampling
    found = distribution(logits, params)
    powers = [math.exp(float(x) / temperature) for x in logits]
    kept = [i for i, power in enumerate(powers) if power and power >= min_p * max(powers) * (1 - 1e-9)]
    kept.sort(key=lambda i: -weights[i])
    kept = [i for i in kept if weights[i] >= weights[kept[min(top_k or len(kept), len(kept)) - 1]]]
    total = math.fsum(powers[i] for i in kept)
    before = [math.fsum(powers[i] for i in kept[:place]) / total for place in range(len(kept))]
    surely = {i for i, mass in zip(kept, before, strict=True) if mass < top_p - 1e-9} | {kept[0]}
    maybe = {
        i for i, mass in zip(kept, before, strict=True) if mass < top_p + 1e-9
    }  # an edge within rounding
    support = set(np.flatnonzero(found).tolist())
    assert surely <= support <= surely | maybe
    np.testing.assert_allclose(found[kept[0]], powers[kept[0]] / math.fsum(powers), rtol=1e-12)
    for i in support:
        assert found[i] / found[kept[0]] == pytest.approx(powers[i] / powers[kept[0]], rel=1e-12)


def test_a_draw_is_the_inverse_of_the_distribution_function() -> None:
    probs = np.array([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    wanted = [(0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (1.0 - 2.0**-53, 4)]
    assert [draw(probs, u) for u, _ in wanted] == [token for _, token in wanted]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0, "logit_bias": ((3, 5.0), (3, 2.0))},
        {"temperature": 0.7, "top_p": 0.8, "top_k": 9, "min_p": 0.01, "repetition_penalty": 1.3},
        {"allowed_token_ids": (3, 9), "bad_words": ((9,),), "min_tokens": 5, "stop_token_ids": (4,)},
    ],
)
def test_the_logits_are_left_as_they_were_also_where_they_cannot_be_written(
    params: dict[str, object],
) -> None:
    logits = random_logits(3)
    before = logits.copy()
    logits.flags.writeable = False
    masked = constrained([3, 4, 5, 9], seed=3, **params)
    assert not any(
        isinstance(token, Failure) for token in sample(logits, [sequence(**params)] * 2 + [masked])
    )
    assert np.array_equal(logits, before)


def test_a_tensor_of_the_cpu_and_rows_with_gaps_give_the_tokens_of_an_array() -> None:
    logits = random_logits(6)
    requests = [sequence(seed=i, temperature=float(i % 2)) for i in range(6)]
    wanted = sample(logits, requests)
    assert sample(torch.from_numpy(logits), requests) == wanted
    assert sample(np.asfortranarray(logits), requests) == wanted
    wide = np.repeat(logits, 2, axis=0)
    assert sample(wide[::2], requests) == wanted


def test_negative_tokens_fail_their_row_and_name_no_token_from_the_end() -> None:
    for params in ({"allowed_token_ids": (-1,)}, {"logit_bias": ((-1, 5.0),)}, {"bad_words": ((-1,),)}):
        assert sample(random_logits(), [sequence(temperature=0.0, **params)]) == [BAD_ROW]


class Allows:
    """A ``Matcher`` of fixed tokens."""

    is_ready = True

    def __init__(self, tokens: list[int]) -> None:
        self.bits = np.zeros(-(-VOCAB // 32), dtype=np.uint32)
        for token in tokens:
            self.bits[token // 32] |= np.uint32(1 << token % 32)

    def allowed(self, output: list[int]) -> np.ndarray:
        return self.bits


class Fails(Allows):
    def allowed(self, output: list[int]) -> np.ndarray:
        raise ConstraintFailed("too complex")


def constrained(tokens: list[int], **params: object) -> Request:
    made = sequence(**params)
    made.matcher = Allows(tokens)  # type: ignore[assignment]
    return made


@pytest.mark.parametrize(
    "params", [{}, {"top_k": 5}, {"top_p": 0.5}, {"repetition_penalty": 1.3, "logit_bias": ((3, 9.0),)}]
)
def test_a_constraint_is_a_mask_before_temperature_and_filters(params: dict[str, object]) -> None:
    logits, tokens = random_logits(200), [3, 31, 32, 49]
    logits[:, 7] = 50.0
    found = sample(logits, [constrained(tokens, seed=i, **params) for i in range(200)])
    assert set(found) <= set(tokens) and (len(set(found)) == 4 or "top_p" in params or "logit_bias" in params)
    greedy = sample(logits, [constrained(tokens, temperature=0.0) for _ in range(200)])
    assert greedy == [tokens[int(row[tokens].argmax())] for row in logits]
    masked = np.full_like(logits, -np.inf)
    masked[:, tokens] = logits[:, tokens]
    if not params:
        assert found == sample(masked, [sequence(seed=i) for i in range(200)])


def test_rows_beside_a_constrained_one_keep_their_tokens_and_a_failed_constraint_is_its_own() -> None:
    logits = random_logits(3)
    failing = constrained([1])
    failing.matcher = Fails([1])  # type: ignore[assignment]
    free = [sequence(seed=5), sequence(temperature=0.0)]
    alone = sample(logits[[0, 2]], free)
    assert sample(logits, [free[0], failing, free[1]]) == [alone[0], OUTSIDE_CONSTRAINT, alone[1]]
    assert sample(logits, [free[0], constrained([2]), free[1]]) == [alone[0], 2, alone[1]]
    assert sample(logits[:1], [constrained([])]) == [NONE_LEFT]
    assert sample(logits[:1], [constrained([2], bad_words=((2,),))]) == [NONE_LEFT]
