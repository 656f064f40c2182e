"""The checker on event loops: verdicts kept, work done once, a process that dies, an extra that is missing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future

import pytest

from optkit import extras
from optkit.runtime.types import Constraint
from optkit.serve.constraints import checker as module
from optkit.serve.constraints import process
from optkit.serve.constraints.checker import ConstraintChecker, NamedConstraint
from optkit.serve.constraints.messages import Verdict
from optkit.serve.constraints.process import CompilerProcess
from optkit.serve.http.errors import ApiError
from tests.support.serve_fakes import post, tiny_app
from tests.support.tiny_tokenizer import tiny_tokenizer

DIGITS = NamedConstraint(Constraint("regex", "[0-9]+"), "guided_regex")


def with_checker(work: Callable[[ConstraintChecker], Awaitable[None]]) -> None:
    async def go() -> None:
        checker = ConstraintChecker(tiny_tokenizer())
        try:
            await work(checker)
        finally:
            await checker.close()

    asyncio.run(go())


def schema(value: object) -> NamedConstraint:
    return NamedConstraint(Constraint("json_schema", json.dumps(value)), "response_format")


def test_constraints_come_back_checked_and_wrong_ones_are_400_with_the_field() -> None:
    async def work(checker: ConstraintChecker) -> None:
        assert await checker.checked(None) is None
        assert await checker.checked(DIGITS) == DIGITS.constraint
        gbnf = await checker.checked(NamedConstraint(Constraint("grammar", 'root ::= "a"'), "guided_grammar"))
        assert gbnf is not None and "start" in gbnf.value
        for wrong, words, code in (
            (
                schema({"type": "array", "uniqueItems": True}),
                "not supported: uniqueItems",
                "invalid_json_schema",
            ),
            (schema({"type": "integer", "multipleOf": 1000003}), "50 ms", "invalid_json_schema"),
            (DIGITS._replace(constraint=Constraint("regex", "(")), "unclosed", "invalid_value"),
            (schema({"enum": ["a" * 200_000]}), "characters", "invalid_json_schema"),
        ):
            with pytest.raises(ApiError) as caught:
                await checker.checked(wrong)
            assert words in caught.value.message
            assert (caught.value.status, caught.value.param, caught.value.code) == (400, wrong.param, code)

    with_checker(work)


def test_a_constraint_is_compiled_once_for_all_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    real = CompilerProcess.ask

    def counted(process: CompilerProcess, constraint: Constraint) -> Future[Verdict]:
        asked.append(constraint.value)
        return real(process, constraint)

    monkeypatch.setattr(CompilerProcess, "ask", counted)
    monkeypatch.setattr(module, "MAX_KEPT", 3)

    def pattern(text: str) -> NamedConstraint:
        return NamedConstraint(Constraint("regex", text), "guided_regex")

    async def work(checker: ConstraintChecker) -> None:
        await asyncio.gather(*(checker.checked(pattern("a")) for _ in range(5)))
        impatient = asyncio.create_task(checker.checked(pattern("b")))
        await asyncio.sleep(0.001)
        impatient.cancel()  # the client left; the verdict is still of use
        await checker.checked(pattern("b"))
        assert asked == ["a", "b"]
        for text in ("c", "d", "b", "a"):
            await checker.checked(pattern(text))
        assert asked == ["a", "b", "c", "d", "a"]

    with_checker(work)


def test_a_process_that_died_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(checker: ConstraintChecker) -> None:
        await checker.checked(DIGITS)
        assert checker._process is not None
        first = checker._process.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        other = NamedConstraint(Constraint("regex", "b+"), "guided_regex")
        try:
            await checker.checked(other)  # it may be found dead, or die with the question
        except ApiError as error:
            assert error.status == 503 and error.retry_after == 1
            await checker.checked(other)
        assert checker._process.pid != first

    with_checker(work)


def test_a_process_that_does_not_answer_is_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "ANSWER_SECONDS", 0.01)

    async def work(checker: ConstraintChecker) -> None:
        with pytest.raises(ApiError) as caught:
            await checker.checked(DIGITS)
        assert caught.value.status == 503
        monkeypatch.setattr(process, "ANSWER_SECONDS", 30.0)
        assert await checker.checked(DIGITS) == DIGITS.constraint

    with_checker(work)


def test_without_the_extra_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = extras.installed_version
    monkeypatch.setattr(
        extras, "installed_version", lambda name: None if name == "llguidance" else installed(name)
    )

    async def work(checker: ConstraintChecker) -> None:
        with pytest.raises(ApiError) as caught:
            await checker.checked(DIGITS)
        assert "llguidance" in caught.value.message and caught.value.param == "guided_regex"
        assert (caught.value.status, caught.value.code) == (400, "unsupported_parameter")
        assert checker._process is None

    with_checker(work)


def regex(text: str) -> NamedConstraint:
    return NamedConstraint(Constraint("regex", text), "guided_regex")


def test_one_process_serves_event_loops_one_after_the_other() -> None:
    checker = ConstraintChecker(tiny_tokenizer())
    pids = set()
    for text in ("a+", "b+", "a+", "c+"):
        assert asyncio.run(checker.checked(regex(text))) == regex(text).constraint
        assert checker._process is not None
        pids.add(checker._process.pid)
    asyncio.run(checker.close())
    assert len(pids) == 1


def test_event_loops_of_several_threads_ask_at_once() -> None:
    checker = ConstraintChecker(tiny_tokenizer())
    found: list[Constraint | None] = []

    async def several(name: str) -> list[Constraint | None]:
        return await asyncio.gather(*(checker.checked(regex(f"{name}{i % 3}")) for i in range(9)))

    def loop(name: str) -> None:
        found.extend(asyncio.run(several(name)))

    threads = [threading.Thread(target=loop, args=(name,)) for name in "abab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(checker.close())
    values = sorted(constraint.value for constraint in found if constraint)
    assert values == sorted([f"{name}{i % 3}" for name in "abab" for i in range(9)])


def test_a_loop_that_ends_before_the_verdict_leaves_the_process_in_order() -> None:
    checker = ConstraintChecker(tiny_tokenizer())

    async def impatient() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(checker.checked(DIGITS), 0.001)

    asyncio.run(impatient())
    assert asyncio.run(checker.checked(DIGITS)) == DIGITS.constraint
    asyncio.run(checker.close())


def test_a_closed_checker_works_again() -> None:
    """As when an application's lifespan runs twice."""

    async def work(checker: ConstraintChecker) -> None:
        assert await checker.checked(DIGITS) == DIGITS.constraint
        await checker.close()
        await checker.close()
        assert await checker.checked(DIGITS) == DIGITS.constraint

    with_checker(work)


def test_an_application_answers_constrained_requests_on_a_loop_each() -> None:
    app = tiny_app()
    for pattern in ("[a-z]+", "[A-Z]+", "[a-z]+"):
        body = {"model": "tiny", "prompt": "a", "guided_regex": pattern, "max_tokens": 1}
        assert post(app, "/v1/completions", body).status_code == 200
