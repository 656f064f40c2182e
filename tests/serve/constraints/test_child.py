"""The process that compiles: verdicts, and hostile constraints that end within their bounds."""

from __future__ import annotations

import io
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from optkit.runtime.structured import grammar
from optkit.runtime.types import Constraint
from optkit.serve.constraints import child
from optkit.serve.constraints.messages import HEADER, Tokens, Verdict, frame
from tests.support.constrained import vocabulary
from tests.support.tiny_tokenizer import fast_tokenizer


def schema(value: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(value))


def checked(constraint: Constraint) -> Verdict:
    return child.in_fork(partial(grammar.tried, constraint, vocabulary()))


def test_a_good_constraint_comes_back_and_a_grammar_in_lark() -> None:
    good = schema({"type": "object", "properties": {"a": {"type": "integer"}}})
    assert checked(good) == Verdict(constraint=good)
    gbnf = checked(Constraint("grammar", 'root ::= "a" | "b"'))
    assert gbnf.constraint is not None and "start:" in gbnf.constraint.value


def test_a_wrong_constraint_comes_back_with_the_reason() -> None:
    verdict = checked(schema({"type": "array", "uniqueItems": True}))
    assert verdict.constraint is None and "uniqueItems" in str(verdict.error)


def chain(depth: int) -> dict[str, Any]:
    """A chain of references that doubles at each link."""
    links = {
        f"a{i}": {"allOf": [{"anyOf": [{"properties": {f"{x}{i}": {"type": "string"}}} for x in "pq"]},
                            {"$ref": f"#/$defs/a{i + 1}"}]}
        for i in range(depth)
    }  # fmt: skip
    return {"$ref": "#/$defs/a0", "$defs": links | {f"a{depth}": {"type": "object"}}}


HOSTILE = {
    "wide": schema({"type": "object", "properties": {f"key{i}": {"type": "string"} for i in range(4000)}}),
    "multiples": schema({"type": "integer", "multipleOf": 1000003}),
    "doubling": schema(chain(30)),
    "nested lists": schema({"enum": [[[[[i]]]] for i in range(15000)]}),
    "repetition": schema({"type": "string", "pattern": "((a{1,200}){1,200}){1,200}" * 50}),
    "alternatives": Constraint("regex", "|".join(f".*{i}.*" for i in range(4000))),
    "nesting": Constraint("regex", "(" * 5000 + ")" * 5000),
    "text": Constraint("json_schema", "[" * 100_000),
    "grammar": Constraint("grammar", "start: " + " ".join(f"a{i}" for i in range(3000)) + "\n"
                          + "\n".join(f"a{i}: a{(i * 7 + 1) % 3000} | \"x{i}\"" for i in range(3000))),
    "gbnf": Constraint("grammar", "root ::= " + "(" * 20_000),
}  # fmt: skip


@pytest.mark.parametrize("constraint", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_constraint_costs_a_bounded_time(constraint: Constraint) -> None:
    """Processor time, without that of the fork itself; a busy machine does not count, nor a slow moment: the least of
    up to three tries.
    """
    vocabulary()
    for _ in range(3):
        fork = seconds_of_children(partial(child.in_fork, partial(Constraint, "regex", "a")))
        used = seconds_of_children(partial(checked, constraint))
        if used < fork + child.CPU_SECONDS + 0.05:
            return
    raise AssertionError(f"{used:.3f} s, of which a fork is {fork:.3f}")


def seconds_of_children(work: Callable[[], object]) -> float:
    """Processor time of the processes that ``work`` starts and waits for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    work()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("name", ["wide", "multiples"])
def test_the_client_learns_that_it_took_too_long(name: str) -> None:
    assert checked(HOSTILE[name]).error == child.TOO_SLOW


@pytest.mark.skipif(sys.platform != "linux", reason="memory of a process is limited on Linux")
def test_memory_is_bounded() -> None:
    """In a new process: free memory in the heap of this one is not counted."""
    code = (
        "from tests.serve.constraints.test_child import HOSTILE, checked, child\n"
        "child.MEMORY_BYTES, child.CPU_SECONDS = 2**20, 5.0\n"
        "print(checked(HOSTILE['wide']).error == child.TOO_LARGE)\n"
    )
    root = Path(__file__).resolve().parents[3]
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True).stdout
        == "True\n"
    )


def test_a_fork_that_does_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "WALL_SECONDS", 0.2)
    start = time.monotonic()
    assert child.in_fork(lambda: time.sleep(60)).error == child.TOO_SLOW  # type: ignore[arg-type, return-value]
    assert time.monotonic() - start < 5


def test_main_answers_until_the_pipe_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pipe:
        def __init__(self, data: bytes = b"") -> None:
            self.buffer = io.BytesIO(data)

    asked = [Tokens(fast_tokenizer().to_str(), 302), Constraint("regex", "a+"), Constraint("regex", "(")]
    sink = Pipe()
    monkeypatch.setattr(sys, "stdin", Pipe(b"".join(map(frame, asked))))
    monkeypatch.setattr(sys, "stdout", sink)
    monkeypatch.setattr(child.signal, "signal", lambda *_: None)
    assert child.main() == 0
    data, verdicts = sink.buffer.getvalue(), []
    while data:
        (length,) = HEADER.unpack(data[: HEADER.size])
        verdicts.append(msgspec.msgpack.decode(data[HEADER.size : HEADER.size + length], type=Verdict))
        data = data[HEADER.size + length :]
    assert verdicts[0] == Verdict(constraint=Constraint("regex", "a+"))
    assert "unclosed" in str(verdicts[1].error) and len(verdicts) == 2


def test_a_tokenizer_without_grammars_is_the_answer_to_every_constraint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Pipe:
        def __init__(self, data: bytes = b"") -> None:
            self.buffer = io.BytesIO(data)

    sink = Pipe()
    monkeypatch.setattr(sys, "stdin", Pipe(frame(Tokens("{}", 302)) + frame(Constraint("regex", "a"))))
    monkeypatch.setattr(sys, "stdout", sink)
    monkeypatch.setattr(child.signal, "signal", lambda *_: None)
    assert child.main() == 0
    assert b"tokenizer" in sink.buffer.getvalue()
