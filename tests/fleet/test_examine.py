"""Examinations of a new replica: a slow or inconsistent one is found, and the same one is let through."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from optkit.bench.statistics import Interval
from optkit.errors import UserError
from optkit.fleet import examine
from optkit.fleet.examine import Exam, compared, judged, same_tokenizer
from optkit.fleet.replica import Mark, ReplicaGone, ReplicaReport, Work
from optkit.runtime.types import FinishReason, TokenOutput

VOCABULARY = 1000


class Timed:
    """A replica with ``seconds`` to the first token, and a tenth of that for each further one, both with noise.

    Args:
        error: the request of that number ends with an error.
        forgets: answers differ from time to time.
    """

    def __init__(self, seconds: float, error: int | None = None, forgets: bool = False) -> None:
        self.seconds, self.error, self.forgets = seconds, error, forgets
        self.replica_id, self.dice, self.count = "r", random.Random(seconds), 0

    async def generate(self, work: Work) -> AsyncGenerator[TokenOutput, None]:
        request, self.count = work.request, self.count + 1
        if self.count == self.error:
            yield TokenOutput(
                request_id="", token_ids=(), finish_reason=FinishReason.ERROR, error="the engine died"
            )
            return
        await asyncio.sleep(self.seconds * self.dice.uniform(0.9, 1.1))
        first = sum(request.prompt_ids) % VOCABULARY + (self.count % 2 if self.forgets else 0)
        yield TokenOutput(request_id="", token_ids=(first,))
        await asyncio.sleep(self.seconds / 10 * self.dice.uniform(0.9, 1.1))
        rest = (5,) * (request.sampling.max_tokens - 1)
        yield TokenOutput(request_id="", token_ids=rest, finish_reason=FinishReason.LENGTH)

    async def report(self, since: Mark) -> ReplicaReport:
        raise NotImplementedError

    async def drain(self) -> None:
        raise NotImplementedError


def test_a_slow_replica_fails_and_an_equal_one_passes() -> None:
    verdict = asyncio.run(compared(Timed(0.02), Timed(0.01), VOCABULARY, seed=1))
    assert (
        not verdict.passed and "time to first token 1." in verdict.reason and "beyond 1.1x" in verdict.reason
    )
    verdict = asyncio.run(compared(Timed(0.01), Timed(0.013), VOCABULARY, seed=1))
    assert verdict.passed and "within 1.1x" in verdict.reason


def test_what_is_not_shown_has_failed() -> None:
    near = {"ttft": Interval(1.0, 1.09, 1.2, 8), "tpot": Interval(0.9, 1.0, 1.05, 8)}
    assert judged(near, 1.1, is_last=False) is None
    verdict = judged(near, 1.1, is_last=True)
    assert verdict is not None and not verdict.passed
    assert verdict.reason == (
        "time to first token 1.09x [1, 1.2] of the old one's, not shown to be within 1.1x"
    )
    slow = judged(near | {"tpot": Interval(1.2, 1.3, 1.4, 8)}, 1.1, is_last=False)
    assert slow is not None and "time per token 1.3x [1.2, 1.4]" in slow.reason
    assert judged({"ttft": None}, 1.1, is_last=False) is None


@pytest.mark.parametrize(
    ("replica", "text"),
    [(Timed(0.0, error=3), "the engine died"), (Timed(0.0, forgets=True), "two different answers")],
)
def test_a_replica_that_fails_or_forgets_fails_the_test(replica: Timed, text: str) -> None:
    verdict = asyncio.run(examine.tested(replica, VOCABULARY, seed=1))
    assert not verdict.passed and text in verdict.reason


def test_a_sound_replica_passes_the_test() -> None:
    replica = Timed(0.0)
    assert asyncio.run(examine.tested(replica, VOCABULARY, seed=1)).passed
    assert replica.count == 2 * len(examine.TEST_LENGTHS)


def test_a_failed_request_of_the_comparison_is_a_failure() -> None:
    verdict = asyncio.run(compared(Timed(0.0, error=2), Timed(0.0), VOCABULARY, seed=1))
    assert not verdict.passed and "the engine died" in verdict.reason


class Lost(Timed):
    """A replica that dies, or stays silent."""

    def __init__(self, is_silent: bool) -> None:
        super().__init__(0.0)
        self.is_silent = is_silent

    async def generate(self, work: Work) -> AsyncGenerator[TokenOutput, None]:
        yield TokenOutput(request_id="", token_ids=(5,))
        if self.is_silent:
            await asyncio.Event().wait()
        raise ReplicaGone("the connection broke", was_begun=True, replica_id="r")


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_replica_that_dies_or_stays_silent_has_failed(
    is_silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examine, "ANSWER_SECONDS", 0.1)
    reason = "r had no answer within 0.1 s" if is_silent else "r died: the connection broke"
    assert asyncio.run(examine.tested(Lost(is_silent), VOCABULARY)).reason == reason
    assert asyncio.run(compared(Lost(is_silent), Timed(0.01), VOCABULARY)).reason == reason


def test_tokenizers_are_compared_by_their_bytes(tmp_path: Path) -> None:
    for name, text in (("a", "{}"), ("b", "{}"), ("c", '{"x": 1}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(text)
    assert same_tokenizer(str(tmp_path / "a"), str(tmp_path / "b"))
    assert not same_tokenizer(str(tmp_path / "a"), str(tmp_path / "c"))


def test_an_order_is_read_strictly() -> None:
    order = Exam(fleet="f", kind="test", canary="r")
    assert Exam.read(order.to_args()) == order
    with pytest.raises(UserError, match="kinds"):
        Exam.read({"fleet": "f", "kind": "test", "canary": "r", "kinds": 1})
