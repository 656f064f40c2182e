"""Replicas die and answers stay the same; a request that ends engines ends two, and harms nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bench.fleet.local_fleet import MockFleet
from optkit.fleet.failover import Failover, Placed, Wanted
from optkit.fleet.mock import MockModel, mock_engine
from optkit.fleet.replica import Fetch, ReplicaGone, Work
from optkit.recipe.engine_options import EngineOptions
from optkit.runtime.process.client import ENGINE_DIED, ENGINE_GONE
from optkit.runtime.types import (
    EngineRequest,
    FinishReason,
    FirstToken,
    SamplingParams,
    TokenLogprob,
    TokenOutput,
)
from optkit.serve.quarantine import QUARANTINED
from tests.support.virtual_loop import VirtualLoop

DEADLY = 33
MODEL = MockModel(step_seconds=0.01, num_blocks=512, die_token=DEADLY)
OPTIONS = EngineOptions(block_size=4, max_num_seqs=4)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of ``work`` in virtual time."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


def asked(name: str, prompt: list[int], **params: Any) -> EngineRequest:
    sampling = SamplingParams(**{"max_tokens": 20, "temperature": 0.0} | params)
    return EngineRequest(request_id=name, prompt_ids=tuple(prompt), sampling=sampling, arrival=0.0)


def undisturbed(request: EngineRequest) -> list[int]:
    """The answer of an engine that no other request shares."""
    return mock_engine(MockModel(step_seconds=0.0)).generate([list(request.prompt_ids)], request.sampling)[0]


async def collect(failover: Failover, request: EngineRequest) -> list[TokenOutput]:
    async with aclosing(failover.generate(request)) as outputs:
        return [output async for output in outputs]


def tokens(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


async def fleet_of(count: int, model: MockModel = MODEL, **options: Any) -> MockFleet:
    fleet = MockFleet(OPTIONS, **options)
    for _ in range(count):
        await fleet.add(model)
    return fleet


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.2}])
def test_generate_goes_on_with_the_same_answer_when_the_replica_is_killed(params: dict[str, Any]) -> None:
    request = asked("a", [40, 41, 42], **params)

    async def go() -> tuple[list[TokenOutput], MockFleet]:
        fleet = await fleet_of(2)
        answer = asyncio.create_task(collect(fleet.failover, request))
        await asyncio.sleep(0.075)
        next(replica for replica in fleet.replicas.values() if replica.num_streams).kill()
        outputs = await answer
        await fleet.close()
        return outputs, fleet

    outputs, fleet = run(go())
    assert tokens(outputs) == undisturbed(request)
    assert [output.finish_reason for output in outputs][-1] is FinishReason.LENGTH
    assert sum(output.first is not None for output in outputs) == 1
    assert outputs[-1].num_migrations == 1 and outputs[0].num_migrations == 0
    (migration,) = fleet.migrations
    assert migration.was_begun and migration.num_tokens == 7
    assert migration.seconds == pytest.approx(0.01 + 10 / 3000), "a step with ten tokens"


def test_generate_moves_a_request_that_was_not_begun_as_often_as_needed() -> None:
    async def go() -> tuple[list[TokenOutput], MockFleet]:
        fleet = await fleet_of(1, restart_seconds=1.0)
        busy = [asyncio.create_task(collect(fleet.failover, asked(f"b{i}", [50 + i]))) for i in range(4)]
        await asyncio.sleep(0.015)
        waiting = asyncio.create_task(collect(fleet.failover, asked("w", [60])))
        for _ in range(3):
            await asyncio.sleep(0.015)
            next(iter(fleet.replicas.values())).kill()
            await asyncio.sleep(1.0)
        outputs = await waiting
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
        await fleet.close()
        return outputs, fleet

    outputs, fleet = run(go())
    assert fleet.num_deaths == 3
    assert tokens(outputs) == undisturbed(asked("w", [60]))


def test_generate_ends_with_the_error_of_a_dead_engine_when_nobody_comes() -> None:
    async def go() -> tuple[list[TokenOutput], float]:
        fleet = await fleet_of(1, restart_seconds=None, patience_seconds=5.0)
        answer = asyncio.create_task(collect(fleet.failover, asked("a", [40])))
        await asyncio.sleep(0.05)
        next(iter(fleet.replicas.values())).kill()
        begun = asyncio.get_running_loop().time()
        return await answer, asyncio.get_running_loop().time() - begun

    outputs, seconds = run(go())
    assert outputs[-1].error == ENGINE_DIED and outputs[-1].finish_reason is FinishReason.ERROR
    assert tokens(outputs) == undisturbed(asked("a", [40]))[: len(tokens(outputs))]
    assert seconds == pytest.approx(5.0, abs=0.2)


def test_generate_says_that_nothing_was_begun_when_no_replica_was_ever_there() -> None:
    async def go() -> list[TokenOutput]:
        return await collect(MockFleet(patience_seconds=0.5).failover, asked("a", [40]))

    (output,) = run(go())
    assert output.error == ENGINE_GONE


def test_generate_keeps_to_the_version_of_the_first_token() -> None:
    async def go() -> tuple[list[int], list[str]]:
        fleet = await fleet_of(1, restart_seconds=1.0)
        await fleet.add(MockModel(step_seconds=0.01, answers=1), "v2")
        answers = [asyncio.create_task(collect(fleet.failover, asked(f"a{i}", [40 + i]))) for i in range(2)]
        await asyncio.sleep(0.055)
        next(replica for replica in fleet.replicas.values() if replica.version == "v1").kill()
        found = [tokens(outputs) for outputs in await asyncio.gather(*answers)]
        await fleet.close()
        return found, [migration.target for migration in fleet.migrations]

    found, targets = run(go())
    assert found[0] == undisturbed(asked("a0", [40]))
    assert found[1] == MockModel(answers=1).answer([41], 20)
    assert targets == ["replica-1"], "although the other replica was ready at once"


class Scripted:
    """A replica with given outputs; a number is a death, begun if it is 1."""

    def __init__(self, replica_id: str, *script: TokenOutput | int) -> None:
        self.replica_id, self.script = replica_id, list(script)
        self.works: list[Work] = []

    async def generate(self, work: Work) -> Any:
        self.works.append(work)
        while self.script:
            output = self.script.pop(0)
            if isinstance(output, int):
                raise ReplicaGone("gone", was_begun=bool(output), replica_id=self.replica_id)
            yield output


def scripted(request: EngineRequest, *replicas: Scripted) -> list[TokenOutput]:
    """The outputs, with each of ``replicas`` in turn."""
    left: list[Any] = list(replicas)

    async def choose(wanted: Wanted) -> Placed | None:
        return Placed(left.pop(0), "v1", Work(request=wanted.request)) if left else None

    async def go() -> list[TokenOutput]:
        clock = asyncio.get_running_loop().time
        return await collect(Failover(choose, patience_seconds=1.0, clock=clock), request)

    return run(go())


def test_generate_gives_up_a_replica_of_another_version() -> None:
    def token(value: int) -> TokenOutput:
        return TokenOutput(request_id="a", token_ids=(value,))

    end = TokenOutput(request_id="a", token_ids=(7,), finish_reason=FinishReason.LENGTH)
    replicas = {
        "r1": ("v1", Scripted("r1", token(5), 1)),
        "r2": ("v2", Scripted("r2", token(6))),
        "r3": ("v1", Scripted("r3", end)),
    }
    left, given_up = list(replicas), list[str]()

    async def choose(wanted: Wanted) -> Placed | None:
        version, replica = replicas[name := left.pop(0)]
        work = Work(request=wanted.request)
        return Placed(replica, version, work, lambda: given_up.append(name))  # type: ignore[arg-type]

    failover = Failover(choose, clock=lambda: asyncio.get_running_loop().time())
    outputs = run(collect(failover, asked("a", [40])))
    assert tokens(outputs) == [5, 7] and given_up == ["r2"]
    assert not replicas["r2"][1].works


FIRST = FirstToken(before_queue=0.0, queue=0.0, prefill=0.0, chunk_wait=0.0, num_chunks=1, cached_tokens=7)


def test_generate_reports_prompt_logprobs_and_the_first_token_once() -> None:
    request = asked("a", [40, 41, 42], prompt_logprobs=0)
    scores = tuple(TokenLogprob(token, -1.0) for token in (41, 42))
    one = TokenOutput(request_id="a", token_ids=(), prompt_logprobs=scores[:1])
    two = TokenOutput(
        request_id="a", token_ids=(50,), prompt_logprobs=scores[1:], first=FIRST, num_preemptions=2
    )
    both = TokenOutput(
        request_id="a", token_ids=(51,), prompt_logprobs=scores, first=FIRST, num_preemptions=1
    )
    end = TokenOutput(request_id="a", token_ids=(), stop_token=3, finish_reason=FinishReason.STOP)
    first, second = Scripted("r1", one, two, 1), Scripted("r2", both, end)
    outputs = scripted(request, first, second)
    assert [entry for output in outputs for entry in output.prompt_logprobs] == list(scores)
    assert [output.first for output in outputs] == [None, FIRST, None, None]
    assert [output.num_preemptions for output in outputs] == [0, 2, 3, 2]
    assert tokens(outputs) == [50, 51] and outputs[-1].stop_token == 3
    assert second.works[0].request.continued == 1
    assert second.works[0].request.prompt_ids == (40, 41, 42, 50)


def test_generate_continues_a_continued_request() -> None:
    request = EngineRequest(
        request_id="a", prompt_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=9), arrival=0.0, continued=2
    )
    end = TokenOutput(request_id="a", token_ids=(5,), finish_reason=FinishReason.LENGTH)
    second = Scripted("r2", end)
    scripted(request, Scripted("r1", TokenOutput(request_id="a", token_ids=(4,)), 1), second)
    assert second.works[0].request.prompt_ids == (1, 2, 3, 4) and second.works[0].request.continued == 3


def test_generate_ends_the_request_alone_when_engines_die_twice_without_a_cause() -> None:
    def token(value: int) -> TokenOutput:
        return TokenOutput(request_id="a", token_ids=(value,))

    outputs = scripted(asked("a", [40]), Scripted("r1", token(5), 1), Scripted("r2", token(6), token(7), 1))
    assert tokens(outputs) == [5, 6, 7] and outputs[-1].error == ENGINE_DIED


def test_generate_is_refused_when_a_replica_has_quarantined_the_request() -> None:
    refused = TokenOutput(request_id="a", token_ids=(), finish_reason=FinishReason.ERROR, error=QUARANTINED)

    async def go() -> list[TokenOutput]:
        replicas = [Scripted("r1", refused)]

        async def choose(wanted: Wanted) -> Placed | None:
            return Placed(replicas.pop(), "v1", Work(request=wanted.request))  # type: ignore[arg-type]

        failover = Failover(choose, clock=asyncio.get_running_loop().time)
        return [(await collect(failover, asked(name, [40])))[-1] for name in ("a", "b")]

    first, second = run(go())
    assert first.error == second.error == QUARANTINED, "the second one without asking a replica"


@given(
    replicas=st.integers(1, 4),
    neighbours=st.lists(st.tuples(st.floats(0, 0.3), st.integers(1, 30)), min_size=1, max_size=10),
    arrival=st.floats(0, 0.3),
    after=st.integers(0, 12),
    repeats=st.integers(0, 2),
)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_a_poison_request_ends_two_engines_and_harms_nobody_else(
    replicas: int, neighbours: list[tuple[float, int]], arrival: float, after: int, repeats: int
) -> None:
    model = MockModel(step_seconds=0.01, num_blocks=512, die_token=DEADLY, die_after=after)

    async def go() -> tuple[list[list[TokenOutput]], list[list[TokenOutput]], int]:
        fleet = await fleet_of(replicas, model, restart_seconds=0.5)

        async def later(seconds: float, request: EngineRequest) -> list[TokenOutput]:
            await asyncio.sleep(seconds)
            return await collect(fleet.failover, request)

        good = [
            asyncio.create_task(later(at, asked(f"n{i}", [40 + i], max_tokens=length)))
            for i, (at, length) in enumerate(neighbours)
        ]
        bad = [await later(arrival, asked("p", [DEADLY, 40]))]
        bad += [await collect(fleet.failover, asked(f"p{i}", [DEADLY, 40])) for i in range(repeats)]
        found = await asyncio.gather(*good)
        assert fleet.failover.ledger.probing == frozenset()
        await fleet.close()
        return found, bad, fleet.num_deaths

    found, bad, deaths = run(go())
    assert deaths == 2
    assert [outputs[-1].error for outputs in bad] == [QUARANTINED] * (1 + repeats)
    for i, (outputs, (_, length)) in enumerate(zip(found, neighbours, strict=True)):
        assert tokens(outputs) == MODEL.answer([40 + i], length)
        assert outputs[-1].finish_reason is FinishReason.LENGTH


class FailoverHistory(RuleBasedStateMachine):
    """Random deaths, cancels and waits. Requests that saw one death at most end with the undisturbed answer."""

    @initialize(replicas=st.integers(1, 3), restart=st.sampled_from([0.1, 2.0]))
    def start(self, replicas: int, restart: float) -> None:
        self.loop = VirtualLoop()
        self.fleet: MockFleet = self.loop.run_until_complete(
            fleet_of(replicas, restart_seconds=restart, patience_seconds=1000.0)
        )
        self.requests: dict[str, EngineRequest] = {}
        self.answers: dict[str, asyncio.Task[list[TokenOutput]]] = {}
        self.begun_at_deaths: dict[str, int] = {}

    @rule(
        prompt=st.lists(st.integers(40, 43), min_size=1, max_size=12),
        length=st.integers(1, 40),
        seed=st.sampled_from([None, 1, 2]),
    )
    def add(self, prompt: list[int], length: int, seed: int | None) -> None:
        params: dict[str, Any] = {"max_tokens": length}
        params |= {"temperature": 1.0, "seed": seed, "frequency_penalty": 0.5} if seed is not None else {}
        number = len(self.requests)
        request = asked(f"r{number}", [*prompt, 50 + number], **params)  # no two requests are the same
        self.requests[request.request_id] = request
        self.answers[request.request_id] = self.loop.create_task(collect(self.fleet.failover, request))

    @rule(which=st.integers(0, 2))
    def kill(self, which: int) -> None:
        replicas = list(self.fleet.replicas.values())
        replica = replicas[which % len(replicas)]
        for name, stream in replica._streams.items():
            self.begun_at_deaths[name] = self.begun_at_deaths.get(name, 0) + stream.is_begun
        self.loop.call_soon(replica.kill)
        self.loop.settle()

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.answers)))
        self.answers.pop(name).cancel()
        self.loop.settle()

    @rule(seconds=st.sampled_from([0.005, 0.03, 0.2, 1.5]))
    def wait(self, seconds: float) -> None:
        self.loop.pass_time(seconds)

    @invariant()
    def answers_are_right(self) -> None:
        for name, task in list(self.answers.items()) if hasattr(self, "answers") else ():
            if task.done():
                del self.answers[name]
                self.check(self.requests[name], task.result())

    def check(self, request: EngineRequest, outputs: list[TokenOutput]) -> None:
        found, right = tokens(outputs), undisturbed(request)
        if outputs[-1].error is None:
            assert found == right and outputs[-1].finish_reason is FinishReason.LENGTH
        else:
            assert found == right[: len(found)]
            assert outputs[-1].error in (QUARANTINED, ENGINE_DIED)
            assert self.begun_at_deaths.get(request.request_id, 0) >= 2

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.pass_time(120.0)
            self.answers_are_right()
            assert not self.answers, "a request never ended"
            assert not self.fleet.failover.ledger.probing
            assert not any(replica.num_streams for replica in self.fleet.replicas.values())
            self.loop.run_until_complete(self.fleet.close())
            self.loop.close()


TestFailoverHistory = FailoverHistory.TestCase
TestFailoverHistory.settings = settings(deadline=None, max_examples=20, stateful_step_count=30)


class MayDie:
    """A replica that answers with a token once ``may`` is set, or dies where ``dies``."""

    def __init__(self, name: str, dies: bool) -> None:
        self.replica_id, self.dies, self.may, self.count = name, dies, asyncio.Event(), 0

    async def generate(self, work: Work) -> Any:
        self.count += 1
        await self.may.wait()
        if self.dies:
            raise ReplicaGone("died", was_begun=True, replica_id=self.replica_id)
        reason = FinishReason.LENGTH
        yield TokenOutput(request_id=work.request.request_id, token_ids=(1,), finish_reason=reason)


@pytest.mark.parametrize("dies", [True, False])
def test_a_prompt_that_ends_the_replica_that_computes_it_ends_one_more(dies: bool) -> None:
    """Prefill apart from decode: ``p`` dies with the prompt, and ``d`` computes it itself."""

    async def go() -> tuple[list[TokenOutput], list[int], Failover]:
        replicas = [MayDie("d", dies), MayDie("e", dies)]
        fetch = Fetch("p", "p:1", (), computes=True)

        async def choose(wanted: Wanted) -> Placed | None:
            able = [each for each in replicas if each.replica_id not in wanted.avoid]
            first = able[0].replica_id == "d"
            work = Work(request=wanted.request, fetch=fetch if first else None)
            return Placed(able[0], "v", work) if able else None  # type: ignore[arg-type]

        failover = Failover(choose)
        answer = asyncio.create_task(collect(failover, asked("a", [40, 41])))
        await asyncio.sleep(0.01)
        failover.source_gone("p")
        for each in replicas:
            each.may.set()
        return await answer, [each.count for each in replicas], failover

    outputs, counts, failover = run(go())
    assert outputs[-1].error == (QUARANTINED if dies else None)
    assert counts == [1, 0], "the next replica is not asked"
    assert not failover._sourced.get("p")
