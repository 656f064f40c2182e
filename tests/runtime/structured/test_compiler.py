"""Compiling beside the steps: who waits, who does not, and what is kept."""

from __future__ import annotations

import threading

import pytest

from optkit import extras
from optkit.runtime.structured.compiler import MAX_KEPT, Grammars
from optkit.runtime.types import Constraint, ConstraintFailed, EngineRefusal, EngineRequest
from tests.support.constrained import SIZE, constrained_engine, decode, sampling, texts, vocabulary
from tests.support.fakes import fake_engine

DIGITS = Constraint("regex", "[0-9]{4}")


def request(name: str, constraint: Constraint | None) -> EngineRequest:
    return EngineRequest(request_id=name, prompt_ids=(1, 2), sampling=sampling(constraint), arrival=0.0)


def test_a_request_waits_for_its_grammar_and_others_do_not() -> None:
    ready = threading.Event()
    engine = constrained_engine()
    engine.grammars = Grammars(lambda: (ready.wait(10), vocabulary())[1])
    engine.add_request(request("waits", DIGITS))
    engine.add_request(request("free", None))
    outputs = [output for _ in range(20) for output in engine.step()]
    assert {output.request_id for output in outputs} == {"free"} and len(outputs) == 20
    assert engine.stats().num_deferred == 1
    ready.set()
    for output in iter(lambda: engine.step() if engine.has_work else None, None):
        outputs += output
    assert len(decode(t for o in outputs if o.request_id == "waits" for t in o.token_ids)) == 4


def test_an_engine_with_nothing_else_to_do_sleeps_and_a_waiting_request_can_be_aborted() -> None:
    ready = threading.Event()
    engine = constrained_engine()
    engine.grammars = Grammars(lambda: (ready.wait(10), vocabulary())[1])
    engine.add_request(request("waits", DIGITS))
    threading.Timer(0.3, ready.set).start()
    steps = 0
    while not engine.step():
        steps += 1
    assert steps <= 20  # of 20 ms
    engine.add_request(request("again", Constraint("regex", "a+")))
    (again,) = engine.scheduler.waiting
    assert engine.abort("again") is not None and engine.abort("waits") is not None
    assert not engine.has_work
    assert again.matcher is not None
    again.matcher.wait(5)


def test_a_grammar_is_compiled_once_and_the_least_used_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    from optkit.runtime.structured import grammar

    compiled: list[str] = []
    real = grammar.compiled
    monkeypatch.setattr(grammar, "compiled", lambda c, tokens: (compiled.append(c.value), real(c, tokens))[1])
    grammars = Grammars(vocabulary)

    def use(pattern: str) -> None:
        grammars.matcher(Constraint("regex", pattern), sampling(None)).wait(5)

    for pattern in ("a", "b", "a", "(", "(", "a"):
        use(pattern)
    assert compiled == ["a", "b", "(", "("]  # a failure is tried again
    for i in range(MAX_KEPT):
        use("a")
        use(f"c{i}")
    use("b")
    assert compiled.count("a") == 1 and compiled.count("b") == 2


def test_a_grammar_that_does_not_compile_ends_its_request_alone() -> None:
    engine = constrained_engine()
    bad, good = request("bad", Constraint("regex", "(")), request("good", DIGITS)
    engine.add_request(bad)
    engine.add_request(good)
    ends = {}
    while engine.has_work:
        for output in engine.step():
            ends[output.request_id] = output.finish_reason
    assert ends == {"bad": "error", "good": "stop"}
    assert all(text.isdecimal() for text in texts(engine, [[1]], [sampling(DIGITS)]))


def test_requests_are_refused_without_the_extra_or_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineRefusal, match="tokenizer"):
        bare = fake_engine(options={"vocab_size": SIZE})
        bare.grammars = None
        bare.add_request(request("r", DIGITS))
    installed = extras.installed_version
    monkeypatch.setattr(
        extras, "installed_version", lambda name: None if name == "llguidance" else installed(name)
    )
    with pytest.raises(EngineRefusal, match=r"optkit\[structured\]"):
        constrained_engine().add_request(request("r", DIGITS))


def test_the_vocabulary_of_a_missing_file_is_an_error(tmp_path) -> None:  # type: ignore[no-untyped-def]
    from optkit.runtime.structured.compiler import vocabulary as of_file

    with pytest.raises(ConstraintFailed, match=r"tokenizer\.json"):
        of_file(tmp_path / "tokenizer.json", 100)
