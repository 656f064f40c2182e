"""The examination of a new version: a test of the new replica alone, and a paired comparison with an old replica.

*Test*: prompts twice, without a prefix from the cache, give the same tokens, as many as asked. A tokenizer other than
the old version's is a failure: prompts are tokenized once, whichever version answers.

*Comparison*: rounds of prompts, each prompt to both replicas, one after the other in a random order, beside the
clients' requests. Time to first token and time per token are compared by prompt; the ratio of the medians has an
interval over rounds (``optkit.bench.statistics``). A replica passes when both intervals lie below the bound, and fails
when one lies above. With the bound inside an interval more rounds follow, at most twice; a replica without a verdict
then has failed.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import msgspec

from optkit.bench.statistics import Interval, ratio_interval
from optkit.errors import UserError
from optkit.fleet.replica import Replica, ReplicaGone, Work
from optkit.fleet.rollout import Verdict
from optkit.runtime.types import EngineRequest, SamplingParams

log = logging.getLogger("optkit.fleet")

LOOKS = (8, 16, 24)  # rounds after which a verdict is tried
CONFIDENCE = 1 - 0.05 / len(LOOKS)  # of each look, so 0.95 of all
PROMPTS_A_ROUND = 3
TEST_LENGTHS, LENGTHS = (1, 40, 200), (64, 128, 256)  # tokens of prompts
TEST_TOKENS, TOKENS = 16, 16  # of answers
BOUND = 1.1
ANSWER_SECONDS = 300.0  # of an answer, after which the replica has failed
METRICS = {"ttft": "time to first token", "tpot": "time per token"}

Rounds = list[tuple[dict[int, float], dict[int, float]]]


class Exam(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An order for an examination in a cluster.

    Attributes:
        fleet: name.
        kind: ``test`` or ``compare``.
        canary, baseline: ids of the new replica and of an old one.
        new, old: directories of the artifacts on the nodes; empty: the tokenizers are not compared.
        bound: as for ``compared``.
        number: tells a repeated examination from the one before.
    """

    fleet: str
    kind: Literal["test", "compare"]
    canary: str
    baseline: str = ""
    new: str = ""
    old: str = ""
    bound: float = BOUND
    number: int = 0

    @classmethod
    def read(cls, args: Mapping[str, Any]) -> Exam:
        try:
            return msgspec.convert(dict(args), cls)
        except msgspec.ValidationError as error:
            raise UserError(str(error), where="args of the examination") from error

    def to_args(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


class Answer(NamedTuple):
    """An answer, with seconds to the first token and between two tokens in the mean."""

    tokens: list[int]
    ttft: float
    tpot: float


class ExamFailed(Exception):
    """A replica did not answer; the message is a line."""


async def ask(replica: Replica, request: EngineRequest) -> Answer:
    """The answer of ``replica`` alone.

    Raises:
        ExamFailed: an error in place of tokens, a death of the replica, or no end within ``ANSWER_SECONDS``.
    """
    begun, times, tokens = time.monotonic(), list[float](), list[int]()
    try:
        async with (
            asyncio.timeout(ANSWER_SECONDS),
            aclosing(cast(Any, replica.generate(Work(request=request)))) as outputs,
        ):
            async for output in outputs:
                if output.error is not None:
                    raise ExamFailed(f"{replica.replica_id} failed a request: {output.error}")
                if output.token_ids:
                    times.append(time.monotonic())
                    tokens += output.token_ids
    except ReplicaGone as gone:
        raise ExamFailed(f"{replica.replica_id} died: {gone}") from gone
    except TimeoutError as error:
        raise ExamFailed(f"{replica.replica_id} had no answer within {ANSWER_SECONDS:g} s") from error
    if not times:
        raise ExamFailed(f"{replica.replica_id} answered without a token")
    return Answer(tokens, times[0] - begun, (times[-1] - times[0]) / max(1, len(tokens) - 1))


def request(name: str, length: int, max_tokens: int, vocab_size: int, dice: random.Random) -> EngineRequest:
    """A greedy request of random tokens, whose answer has ``max_tokens`` tokens."""
    ids = tuple(dice.randrange(vocab_size // 4, vocab_size // 2) for _ in range(length))
    sampling = SamplingParams(max_tokens=max_tokens, min_tokens=max_tokens, temperature=0.0)
    salt = f"examination {dice.random()}"
    return EngineRequest(
        request_id=name, prompt_ids=ids, sampling=sampling, arrival=time.monotonic(), cache_salt=salt
    )


async def tested(canary: Replica, vocab_size: int, seed: int | None = None) -> Verdict:
    """The verdict of the test of ``canary`` alone."""
    dice = random.Random(seed)
    for length in TEST_LENGTHS:
        name = f"test-{canary.replica_id}-{length}"
        first = request(name, length, TEST_TOKENS, vocab_size, dice)
        again = msgspec.structs.replace(
            first, request_id=f"{name}-again", cache_salt=f"{first.cache_salt} again"
        )
        try:
            answers = [(await ask(canary, each)).tokens for each in (first, again)]
        except ExamFailed as failure:
            return Verdict(False, str(failure))
        for tokens in answers:
            if len(tokens) != TEST_TOKENS or not all(0 <= token < vocab_size for token in tokens):
                return Verdict(
                    False, f"a prompt of {length} tokens got {len(tokens)} tokens, or some out of range"
                )
        if answers[0] != answers[1]:
            return Verdict(False, f"a prompt of {length} tokens got two different answers")
    return Verdict(True, f"{len(TEST_LENGTHS)} prompts have the same answer twice")


async def compared(
    canary: Replica, baseline: Replica, vocab_size: int, bound: float = BOUND, seed: int | None = None
) -> Verdict:
    """The verdict of the paired comparison.

    Args:
        bound: the most times of ``canary``, as multiples of those of ``baseline``.
    """
    dice = random.Random(seed)
    rounds: dict[str, Rounds] = {metric: [] for metric in METRICS}
    for number in range(1, LOOKS[-1] + 1):
        try:
            found = await _round(canary, baseline, vocab_size, number, dice)
        except ExamFailed as failure:
            return Verdict(False, str(failure))
        for metric, pair in found.items():
            rounds[metric].append(pair)
        if number in LOOKS:
            intervals = {name: ratio_interval(of, CONFIDENCE) for name, of in rounds.items()}
            verdict = judged(intervals, bound, is_last=number == LOOKS[-1])
            if verdict is not None:
                return verdict
    raise AssertionError("the last look has a verdict")


async def _round(
    canary: Replica, baseline: Replica, vocab_size: int, number: int, dice: random.Random
) -> dict[str, tuple[dict[int, float], dict[int, float]]]:
    """The times of both replicas by metric and prompt, the canary's first."""
    found: dict[str, tuple[dict[int, float], dict[int, float]]] = {name: ({}, {}) for name in METRICS}
    for index in range(PROMPTS_A_ROUND):
        length = LENGTHS[index % len(LENGTHS)]
        asked = request(f"compare-{number}-{index}", length, TOKENS, vocab_size, dice)
        for side in dice.sample([0, 1], 2):
            replica = (canary, baseline)[side]
            each = msgspec.structs.replace(
                asked, request_id=f"{asked.request_id}-{dice.random()}", arrival=time.monotonic()
            )
            answer = await ask(replica, each)
            found["ttft"][side][index], found["tpot"][side][index] = answer.ttft, answer.tpot
    return found


def judged(intervals: Mapping[str, Interval | None], bound: float, *, is_last: bool) -> Verdict | None:
    """The verdict from the ratios new / old by metric; None: more rounds are needed."""
    texts = {name: f"{METRICS[name]} {_ratio(found)} of the old one's" for name, found in intervals.items()}
    slow = [name for name, found in intervals.items() if found is not None and found.low > bound]
    if slow:
        return Verdict(False, f"{', '.join(texts[name] for name in slow)}, beyond {bound:g}x")
    unsure = [name for name, found in intervals.items() if found is None or found.high > bound]
    if not unsure:
        return Verdict(True, f"{', '.join(texts.values())}, within {bound:g}x")
    if is_last:
        return Verdict(
            False, f"{', '.join(texts[name] for name in unsure)}, not shown to be within {bound:g}x"
        )
    return None


def _ratio(found: Interval | None) -> str:
    return "?" if found is None else f"{found.estimate:.3g}x [{found.low:.3g}, {found.high:.3g}]"


def same_tokenizer(new: str, old: str) -> bool:
    """True where both artifacts have the same tokenizer.json; raises OSError where a file can't be read."""
    digests = [hashlib.sha256((Path(each) / "tokenizer.json").read_bytes()).digest() for each in (new, old)]
    return digests[0] == digests[1]
