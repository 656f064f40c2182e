"""JSON-Schema-Test-Suite, as it comes with the source of jsonschema: no invalid instance is accepted, and random
answers of every supported schema are valid."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from bench.structured.suite import DRAFTS, cases, download
from optkit.runtime.structured import grammar
from optkit.runtime.types import Constraint, ConstraintFailed
from tests.support.constrained import END, SIZE, decode, encode, vocabulary

WALKS, PATIENCE, LIMIT = 4, 40, 400


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the drafts."""
    return download(tmp_path_factory.mktemp("suite"))


def accepts(start: Any, text: str) -> bool:
    state, ids = start.deep_copy(), encode(text)
    return state.try_consume_tokens(ids) == len(ids) and state.is_accepting()


def random_text(start: Any, seed: int) -> str | None:
    """A random answer; after ``PATIENCE`` tokens what closes is preferred. None after ``LIMIT`` tokens."""
    state, dice, output = start.deep_copy(), random.Random(seed), list[int]()
    closing = {ord(letter) for letter in '"]},:0'}
    while len(output) < LIMIT:
        if state.is_accepting() and (state.is_stopped() or dice.random() < 0.5):
            return decode(output)
        bits = np.frombuffer(state.compute_bitmask(), dtype=np.uint8)
        allowed = set(np.flatnonzero(np.unpackbits(bits, bitorder="little")[:SIZE]).tolist()) - {END}
        choices = allowed & closing if len(output) > PATIENCE else allowed
        token = dice.choice(sorted(choices or allowed))
        state.consume_token(token)
        output.append(token)
    return None


@pytest.mark.soak
@pytest.mark.parametrize("draft", DRAFTS)
def test_supported_part_of_the_suite(draft: str, suite: Path) -> None:
    validators = {uri: jsonschema.validators.validator_for({"$schema": uri}) for uri in DRAFTS.values()}
    supported = accepted = walked = 0
    for schema, tests in cases(suite, draft):
        if not json.dumps((schema, tests), ensure_ascii=False).isascii():
            continue  # the vocabulary has ASCII alone
        try:
            start = grammar.compiled(Constraint("json_schema", json.dumps(schema)), vocabulary())
        except ConstraintFailed:
            continue
        supported += 1
        for test in tests:
            if accepts(start, json.dumps(test["data"])):
                assert test["valid"], (schema, test)
                accepted += 1
        validator = validators[schema["$schema"]](schema)
        for seed in range(WALKS):
            if (text := random_text(start, seed)) is not None:
                walked += 1
                assert validator.is_valid(json.loads(text)), (schema, text)
    assert supported > 80 and accepted > 150 and walked > 3 * supported
