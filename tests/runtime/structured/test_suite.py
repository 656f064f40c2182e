"""JSON-Schema-Test-Suite, as it comes with the source of jsonschema: no invalid instance is accepted, and random
answers of every supported schema are valid."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from optkit.runtime.structured import grammar
from optkit.runtime.types import Constraint, ConstraintFailed
from tests.support.constrained import END, SIZE, decode, encode, vocabulary

DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft4": "http://json-schema.org/draft-04/schema#",
}
WALKS, PATIENCE, LIMIT = 4, 40, 400


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the drafts."""
    root = tmp_path_factory.mktemp("suite")
    wanted = f"jsonschema=={metadata.version('jsonschema')}"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--no-binary",
        ":all:",
        "-d",
        str(root),
    ]
    subprocess.run([*pip, wanted], check=True, timeout=600)
    (archive,) = root.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(root, filter="data")
    (found,) = root.glob("jsonschema-*/json/tests")
    return found


def cases(folder: Path, uri: str) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Schema and tests of each case with a schema that is an object and has only ASCII."""
    for file in sorted(folder.glob("*.json")):
        for case in json.loads(file.read_text()):
            if isinstance(case["schema"], dict) and json.dumps(case, ensure_ascii=False).isascii():
                yield {"$schema": uri, **case["schema"]}, case["tests"]


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
    for schema, tests in cases(suite / draft, DRAFTS[draft]):
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
