"""Trees of guesses: what is guessed, how wide, what is learned, and the same answers as without."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from optkit.runtime.draft_tree import DraftTree, depths_of
from optkit.runtime.engine import Engine
from optkit.runtime.sampling.proposer import StepTime
from optkit.runtime.sampling.speculative import Followed
from optkit.runtime.sampling.tree_speculator import Chances, TreeSpeculator
from optkit.runtime.scheduling.cost_model import CostModel, StepWork
from optkit.runtime.scheduling.row_costs import RowCosts
from optkit.runtime.types import EngineRequest, Request, SamplingParams, ScheduledRequest
from tests.support.fakes import FakeRunner, fake_engine
from tests.support.speculation import Untimed, sequence


class Priced(CostModel):
    """A row costs ``price`` of the step with one."""

    def __init__(self, price: float) -> None:
        super().__init__()
        self.price = price

    def seconds(self, shape: StepWork) -> float:
        return 1.0 + self.price * (shape.tokens - 1)


def propose(speculator: TreeSpeculator, request: Request, limit: int = 16) -> tuple[int, ...]:
    request.num_computed = len(request.token_ids) - 1
    (draft,) = speculator.propose([request], [limit])
    return draft


def test_a_repetition_is_copied_as_far_as_pays() -> None:
    ids = [1, 2, 3, 4, 5, 6, 7, 8] * 4
    free, cheap, dear = (TreeSpeculator(Priced(price), 16) for price in (0.0, 0.2, 2.0))
    assert propose(free, sequence(ids)) == tuple(ids[:16])
    draft = propose(cheap, sequence(ids))
    assert 0 < len(draft) < 16 and draft == tuple(ids[: len(draft)])
    assert propose(dear, sequence(ids)) == ()
    assert propose(free, sequence(ids), limit=3) == (1, 2, 3)
    assert propose(free, sequence(ids), limit=0) == ()
    for short in ([1], [1, 2, 3]):
        assert propose(TreeSpeculator(Priced(0.0), 16), sequence(short)) == ()


def test_two_continuations_are_branches() -> None:
    ids = [1, 2, 3, 4, 9, 1, 2, 5, 6, 9, 1, 2]
    draft = propose(TreeSpeculator(Priced(0.0), 32), sequence(ids), 4)
    assert isinstance(draft, DraftTree)
    assert {draft[row] for row, depth in enumerate(draft.depths) if depth == 1} == {3, 5}
    chain = propose(TreeSpeculator(Priced(0.0), 32, branches=False), sequence(ids), 4)
    assert not isinstance(chain, DraftTree)
    assert chain[:3] in ((3, 4, 9), (5, 6, 9))


def test_what_was_wrong_is_guessed_no_more() -> None:
    """The last two tokens come again and again, each time with another token after them."""
    speculator = TreeSpeculator(Priced(0.2), 8)
    request = sequence([1, 2, 30])
    drafted = []
    for new in range(31, 90):
        request.token_ids += [1, 2]
        drafted.append(len(propose(speculator, request)))
        request.token_ids.append(new)
        propose(speculator, request)
    assert sum(drafted[-30:]) == 0


def test_guesses_that_were_not_made_are_judged() -> None:
    speculator = TreeSpeculator(Priced(5.0), 8)  # no guess pays
    request = sequence([1, 2, 3, 4] * 3)
    for token in [1, 2, 3, 4] * 5:
        assert propose(speculator, request) == ()
        request.token_ids.append(token)
    speculator.costs = RowCosts(Priced(0.1))
    assert len(propose(speculator, request)) == 8


class Stepped(CostModel):
    """Steps of an even number of rows cost as much as those of one row less; the second row costs half a step."""

    def seconds(self, shape: StepWork) -> float:
        return 1.0 if shape.tokens < 2 else 1.5 + 0.4 * ((shape.tokens - 1) // 2)


def test_rows_that_cost_nothing_are_filled() -> None:
    """With the last known token the rows are even in number: one guess more would cost as much as two."""
    ids = [1, 2, 3, 4, 5, 6, 7, 8] * 4
    assert [len(propose(TreeSpeculator(Stepped(), most), sequence(ids))) for most in (3, 4, 5, 6)] == [
        3,
        3,
        5,
        5,
    ]


def took(
    speculator: TreeSpeculator, request: Request, draft: tuple[int, ...], seconds: float, num_steps: int = 1
) -> None:
    """A step of ``request`` alone, which without guesses could have been one of several in a call."""
    item = ScheduledRequest(request, 1 + len(draft), draft)
    speculator.took([item], StepTime(seconds, num_steps, could_be_several=True))


def test_measured_times_of_steps_decide() -> None:
    """A model that says guesses are free is corrected by steps that take longer."""
    ids = [1, 2, 3, 4, 5, 6, 7, 8] * 4
    speculator = TreeSpeculator(Priced(0.0), 4)
    assert len(propose(speculator, sequence(ids))) == 4
    for _ in range(40):
        for rows in range(1, 6):
            took(speculator, sequence(ids), tuple(ids[: rows - 1]), 1.0 if rows == 1 else 9.0)
    assert propose(speculator, sequence(ids)) == ()


def steps_of_a_call(speculator: TreeSpeculator, request: Request, text: list[int]) -> int:
    """The steps up to a pair that the speculator watches, if the answer goes on as ``text``."""
    (watched,), place = speculator.watched([request]), len(request.token_ids)
    most = min(speculator.steps_ahead([request]), len(text) - place)
    for steps in range(1, most):
        last = (text[place + steps - 2], text[place + steps - 1])
        if any(last in pairs for pairs in watched):
            return steps
    return most


@pytest.mark.parametrize("letters", [2, 3, 6, 30])
def test_text_of_chance_is_looked_at_rarely_and_loses_little_time(letters: int) -> None:
    random = np.random.default_rng(letters)
    price, alone = 0.3, 1.1  # of a guess and of a step without one that runs alone, in steps of a call
    speculator = TreeSpeculator(Priced(price), 4, branches=False)
    text = random.integers(0, letters, 600).tolist()
    request, place, seconds, looks = sequence(text[:8]), 8, 0.0, 0
    while place < len(text):
        draft = propose(speculator, request)
        looks += not speculator.rests(request)
        steps = 1 if draft else steps_of_a_call(speculator, request, text)
        took(speculator, request, draft, each := 1.0 if steps > 1 else alone + price * len(draft), steps)
        seconds += each * steps
        pairs = zip(draft, text[place:-1], strict=False)
        right = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        if draft:
            speculator.observe(request, draft, tuple(text[place : place + right + 1]))
        place += steps + right
        request.token_ids += text[len(request.token_ids) : place]
    assert (len(text) - 8) / seconds >= 0.97
    assert looks < 200 or letters < 6


def test_steps_run_in_a_call_up_to_a_pair_that_stood_before() -> None:
    speculator = TreeSpeculator(Priced(0.0), 4, max_cached_requests=2)
    earlier = ended("a", [], [60, 61, 62])
    propose(speculator, earlier)
    speculator.finished(earlier)
    request = sequence([1, 2, 3, 4])
    assert propose(speculator, request) == () and not speculator.rests(request)
    assert speculator.steps_ahead([request]) > 1
    (watched,) = speculator.watched([request])
    known = [
        pair
        for pair in ((1, 2), (2, 3), (3, 4), (3, 2), (60, 61), (61, 62))
        if any(pair in each for each in watched)
    ]
    assert known == [(1, 2), (2, 3), (60, 61)]  # with a token after them
    request.token_ids += [1, 2]
    assert propose(speculator, request) == (3, 4, 1, 2)
    assert speculator.steps_ahead([request]) == 1


def test_a_request_that_rests_is_looked_at_in_repetitions() -> None:
    speculator = TreeSpeculator(Priced(0.0), 4)
    text = np.random.default_rng(0).integers(0, 30, 200).tolist()
    request = sequence(text)
    propose(speculator, request)
    speculator.observe(request, (1,), (2,))
    took(speculator, request, (), 1.0, num_steps=4)
    took(speculator, request, (1, 2), 1.75)
    propose(speculator, request)
    assert speculator.rests(request) and speculator.steps_ahead([request]) > 1
    request.token_ids += text[20:26]
    assert propose(speculator, request) == tuple(text[26:30]) and not speculator.rests(request)
    assert speculator.steps_ahead([request]) == 1
    speculator.observe(request, (1,), (1, 2))
    request.token_ids.append(text[26])
    propose(speculator, request)
    assert not speculator.rests(request)  # a right guess pays for the next look


def test_chances_start_from_the_prior_and_forget() -> None:
    chances = Chances()
    assert chances.of((1,), 0.4) == pytest.approx(0.4)
    for _ in range(200):
        chances.learn((1,), right=True)
    assert chances.of((1,), 0.4) > 0.9
    for _ in range(200):
        chances.learn((1,), right=False)
    assert chances.of((1,), 0.4) < 0.1
    assert chances.of((2,), 0.4) == pytest.approx(0.4)


def ended(name: str, prompt: Sequence[int], answer: Sequence[int], salt: str = "") -> Request:
    received = EngineRequest(
        request_id=name,
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=99),
        arrival=0.0,
        cache_salt=salt,
    )
    return Request(received, [*prompt, *answer])


def test_earlier_answers_are_searched_but_not_across_salts() -> None:
    speculator = TreeSpeculator(Priced(0.0), 8, max_cached_requests=4)
    for name, salt in (("a", ""), ("b", "tenant")):
        request = ended(name, [50, 51], [60, 61, 62, 63] if name == "a" else [70, 71, 72], salt)
        propose(speculator, request)
        speculator.finished(request)
    assert propose(speculator, ended("c", [1, 60, 61], [])) == (62, 63)
    assert propose(speculator, ended("d", [1, 70, 71], [])) == ()
    assert propose(speculator, ended("e", [1, 60, 61], [], salt="other")) == ()
    assert propose(speculator, ended("g", [1, 70, 71], [], salt="tenant")) == (72,)
    for name, pair in (("c", (60, 61)), ("e", (0, 0)), ("g", (70, 71))):
        (watched,) = speculator.watched([ended(name, [], [])])
        known = {each for each in ((60, 61), (70, 71)) if any(each in pairs for pairs in watched)}
        assert known == {pair} - {(0, 0)}


def test_logits_are_recycled_for_the_salt_of_their_request() -> None:
    speculator = TreeSpeculator(Priced(0.0), 4, recycles=True)
    requests = [ended("a", [1, 2], []), ended("b", [1, 2], [], salt="tenant")]
    for request in requests:
        propose(speculator, request)
    logits = np.eye(9, dtype=np.float32)[[3, 4, 5]] * 100
    items = [ScheduledRequest(requests[0], 1), ScheduledRequest(requests[1], 2, (4,))]
    found = [Followed((3,)), Followed((4, 5), (1,))]
    speculator.collect(items, found, logits, [0, 1])
    of = speculator.shared.of
    assert of("").recycled.after((1, 2)) == (2, (3,))
    assert of("tenant").recycled.after((1, 2)) == (2, (4,))
    assert of("tenant").recycled.after((2, 4)) == (2, (5,))
    assert of("").recycled.after((2, 4)) == (0, ())


def test_a_request_keeps_its_sources_beside_many_salts() -> None:
    speculator = TreeSpeculator(Priced(0.0), 4, recycles=True, max_cached_requests=4)
    requests = [ended(str(number), [1, 2, number], [], salt=str(number)) for number in range(9)]
    for request in requests:
        propose(speculator, request)
    logits = np.eye(99, dtype=np.float32)[[40 + number for number in range(9)]] * 100
    items = [ScheduledRequest(request, 1) for request in requests]
    speculator.collect(items, [Followed((40 + number,)) for number in range(9)], logits, list(range(9)))
    for number, request in enumerate(requests):
        request.token_ids += [7, 2, number]
        assert {7, 40 + number} <= set(propose(speculator, request, 8))


def test_recycled_tokens_are_guessed_behind_the_tokens_of_the_text() -> None:
    speculator = TreeSpeculator(Priced(0.0), 4, recycles=True)
    recycled = speculator.shared.of("").recycled
    recycled.add([8, 9], (20, 21))
    recycled.add([9, 20], (22,))
    assert propose(speculator, ended("s", [1, 8, 9], [], salt="tenant")) == ()
    draft = propose(speculator, sequence([1, 8, 9]))
    assert set(draft) == {20, 21, 22}
    assert depths_of(draft)[0] == 1


def speculating(runner_script: list[int] | None = None, **options: object) -> Engine:
    engine = fake_engine(options={"script": runner_script} if runner_script else {})
    engine.scheduler.proposer = Untimed(Priced(0.01), 8, recycles=True, max_cached_requests=8)
    return engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_repeating_model_takes_fewer_steps(temperature: float) -> None:
    sampling = SamplingParams(max_tokens=40, temperature=temperature, seed=3)
    plain = fake_engine(options={"script": [5, 6, 7, 8]})
    guessed = speculating([5, 6, 7, 8])
    assert plain.generate([[1, 2]], sampling) == guessed.generate([[1, 2]], sampling)
    assert len(guessed.runner.batches) < 0.5 * len(plain.runner.batches)
    stats = guessed.stats()
    assert stats.spec_decode_draft_tokens >= sum(stats.spec_decode_accepted_per_pos) > 20


class TwoWays(FakeRunner):
    """After 1 comes 2 or 3, by a hash of everything before: both branches are known, one is right."""

    def logits_after(self, ids: object) -> np.ndarray:
        logits = super().logits_after(ids)  # type: ignore[arg-type]
        last = int(ids[-1])  # type: ignore[index]
        allowed = {1: (2, 3), 2: (4,), 3: (5,), 4: (1,), 5: (1,)}.get(last, (1,))
        kept = np.full_like(logits, -50.0)
        kept[list(allowed)] = logits[list(allowed)]
        return kept


def test_branches_change_nothing() -> None:
    config = fake_engine(options={"max_model_len": 512, "num_blocks": 256}).config
    sizes = {"num_blocks": 256, "block_size": 4}
    sampling = SamplingParams(max_tokens=400, temperature=0.0)
    engines = [
        Engine(TwoWays(**sizes), config, proposer=proposer)
        for proposer in (
            None,
            Untimed(Priced(0.01), 8, branches=False),
            Untimed(Priced(0.01), 8),
        )
    ]
    plain, chains, trees = (engine.generate([[9, 1]], sampling) for engine in engines)
    assert plain == chains == trees
    steps = [len(engine.runner.batches) for engine in engines]  # type: ignore[attr-defined]
    assert max(steps[1:]) < 0.5 * steps[0]
    drafts = [item.draft for batch in engines[2].runner.batches for item in batch.items]  # type: ignore[attr-defined]
    assert any(isinstance(draft, DraftTree) for draft in drafts)
    assert engines[2].stats().kv_blocks_used == 0
    engines[2].scheduler.check()
