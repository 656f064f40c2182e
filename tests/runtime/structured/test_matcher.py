"""The state of a constraint against Python's re and json: rollback, drafts, rebuilding, stop tokens."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.runtime.structured import grammar
from optkit.runtime.structured.matcher import SequenceMatcher
from optkit.runtime.types import Constraint, ConstraintFailed
from tests.support.constrained import END, SIZE, decode, encode, vocabulary

PATTERN = "(ab|cd)+x?"
STEPS = Constraint("json_schema", json.dumps({"type": "object", "properties": {
    "name": {"type": "string"}, "size": {"type": "integer"}, "ok": {"enum": ["true", "tab"]}
}, "required": ["name", "size", "ok"], "additionalProperties": False}))  # fmt: skip


def matcher(constraint: Constraint, stop_ids: tuple[int, ...] = (END,)) -> SequenceMatcher:
    ready: Future = Future()
    ready.set_result((grammar.compiled(constraint, vocabulary()), vocabulary()))
    return SequenceMatcher(ready, stop_ids)


def allowed(state: SequenceMatcher, output: list[int]) -> set[int]:
    bits = state.allowed(output)
    assert bits.dtype == np.uint32 and len(bits) == -(-SIZE // 32)
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


def walk(state: SequenceMatcher, seed: int, limit: int = 40) -> list[int]:
    """Random allowed tokens until the end."""
    dice, output = random.Random(seed), list[int]()
    while len(output) < limit and not state.is_complete(output):
        token = dice.choice(sorted(allowed(state, output)))
        if token == END:
            break
        output.append(token)
    return output


@pytest.mark.parametrize("seed", range(20))
def test_every_walk_along_a_pattern_is_a_prefix_and_ends_where_the_pattern_matches(seed: int) -> None:
    state, output = matcher(Constraint("regex", PATTERN)), list[int]()
    dice = random.Random(seed)
    while len(output) < 30 and not state.is_complete(output):
        choices = allowed(state, output)
        assert (END in choices) == bool(re.fullmatch(PATTERN, decode(output)))
        token = dice.choice(sorted(choices))
        if token == END:
            return
        output.append(token)
    assert re.fullmatch(r"(ab|cd)*(a|c|(ab|cd)x)?", decode(output))


def test_the_answer_is_complete_where_nothing_may_follow_and_only_there() -> None:
    state = matcher(Constraint("regex", PATTERN))
    assert [state.is_complete(encode(text)) for text in ("", "ab", "abx", "abcd")] == [
        False,
        False,
        True,
        False,
    ]
    assert matcher(Constraint("regex", PATTERN), ()).is_complete(encode("cdx"))  # without a stop token, too


@given(seed=st.integers(0, 50), cuts=st.lists(st.integers(0, 40), max_size=6))
def test_a_state_depends_on_the_tokens_alone(seed: int, cuts: list[int]) -> None:
    """In whatever order prefixes of two answers are asked for, the masks are those of a new state."""
    kept = matcher(STEPS)
    answers = [walk(matcher(STEPS), seed), walk(matcher(STEPS), seed + 1000)]
    for i, cut in enumerate(cuts):
        output = answers[i % 2][:cut]
        if kept.is_complete(output):
            continue
        assert allowed(kept, output) == allowed(matcher(STEPS), output)
        assert kept.forced(output) == matcher(STEPS).forced(output)


@given(seed=st.integers(0, 200))
def test_forced_tokens_are_those_whose_mask_has_a_single_token(seed: int) -> None:
    state, full = matcher(STEPS), walk(matcher(STEPS), seed)
    for length in range(len(full)):
        forced = state.forced(full[:length])
        for i, token in enumerate(forced):
            if not state.is_complete(full[:length] + forced[:i]):
                assert allowed(state, full[:length] + forced[:i]) == {token}


def test_drafts_are_counted_up_to_the_first_token_outside_and_change_nothing() -> None:
    state = matcher(Constraint("regex", "[0-9]+"))
    before = allowed(state, encode("4"))
    assert state.num_valid(encode("4"), encode("56a7")) == 2
    assert state.num_valid(encode("4"), []) == 0
    assert allowed(state, encode("4")) == before


def test_a_random_object_is_json_of_the_schema() -> None:
    for seed in range(30):
        state = matcher(STEPS)
        text = decode(walk(state, seed, limit=400))
        if state.is_complete(encode(text)):
            data = json.loads(text)
            assert list(data) == ["name", "size", "ok"] and data["ok"] in ("true", "tab")
            assert json.dumps(data, ensure_ascii=False) == text or "\\" in text or "e" in text


def test_a_trigger_frees_the_text_before_it() -> None:
    state = matcher(Constraint("regex", "[0-9]{2}", after="size"))
    assert len(allowed(state, encode("any text"))) > 120 and END in allowed(state, encode("any text"))
    assert decode(sorted(allowed(state, encode("the size")))) == "0123456789" + "12"
    assert state.is_complete(encode("the size42")) and END not in allowed(state, encode("the size4"))


def test_whitespace_is_fixed_unless_a_pattern_is_given() -> None:
    for pattern, text, fits in (
        ("", '{"a": 1}', True),
        ("", '{"a":1}', False),
        ("[ \\n]{0,3}", '{"a" :\n1}', True),
    ):
        state = matcher(Constraint("json_object", whitespace=pattern))
        assert (state.num_valid([], encode(text)) == len(encode(text))) == fits, text


def test_tokens_outside_the_constraint_are_an_error_and_the_state_recovers() -> None:
    state = matcher(Constraint("regex", "[0-9]+"))
    with pytest.raises(ConstraintFailed, match="allows"):
        state.allowed(encode("4x"))
    assert END in allowed(state, encode("44"))


def test_a_mask_beyond_the_limits_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "STEP_LEXER_FUEL", 1000)
    state = matcher(Constraint("regex", "(.*[a-f].{50}[g-z].*){200}"))
    with pytest.raises(ConstraintFailed, match="complex"):
        for length in range(200):
            state.allowed(encode("a" * length))


def test_a_grammar_that_failed_to_compile_is_an_error_of_each_use() -> None:
    failed: Future = Future()
    failed.set_exception(ConstraintFailed("no such keyword"))
    state = SequenceMatcher(failed, ())
    assert state.is_ready
    with pytest.raises(ConstraintFailed, match="no such keyword"):
        state.allowed([])
