"""JSON-Schema-Test-Suite, as it comes with the source of jsonschema: supported schemas, their instances, answers."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.structured.validity import TEMPERATURE, constraint, generate
from optkit.runtime.engine import Engine
from optkit.runtime.structured import grammar
from optkit.runtime.types import ConstraintFailed
from optkit.text.tokenizer import Tokenizer

DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft4": "http://json-schema.org/draft-04/schema#",
}
MAX_TOKENS = 192  # of an answer; most schemas of the suite are short, but leave strings free

Case = tuple[dict[str, Any], list[dict[str, Any]]]


def download(folder: Path) -> Path:
    """The suite's folder with the drafts, taken out of the source of the installed jsonschema by pip."""
    wanted = f"jsonschema=={metadata.version('jsonschema')}"
    options = ["-q", "--disable-pip-version-check", "--no-deps", "--no-binary", ":all:", "-d", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, wanted], check=True, timeout=600)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    (found,) = folder.glob("jsonschema-*/json/tests")
    return found


def cases(suite: Path, draft: str) -> Iterator[Case]:
    """Schema and instances of each case of ``draft`` with an object as the schema."""
    for file in sorted((suite / draft).glob("*.json")):
        for case in json.loads(file.read_text()):
            if isinstance(case["schema"], dict):
                yield {"$schema": DRAFTS[draft], **case["schema"]}, case["tests"]


def run(engine: Engine, tokenizer: Tokenizer, suite: Path) -> dict[str, Any]:
    """An answer to each supported schema at temperature ``TEMPERATURE``, and the verdicts on the suite's instances."""
    tokens = grammar.vocabulary(tokenizer.to_json(), tokenizer.vocab_size)
    schemas: dict[str, Any] = {}
    found: dict[str, int] = dict.fromkeys(("schemas", "instances", "accepted"), 0)
    wrong = []
    for draft in DRAFTS:
        for number, (schema, tests) in enumerate(cases(suite, draft)):
            found["schemas"] += 1
            try:
                start = grammar.compiled(constraint(schema), tokens)
            except ConstraintFailed:
                continue  # named in a 400
            name = f"{draft}-{number}"
            schemas[name] = schema
            for test in tests:
                found["instances"] += 1
                if not accepts(start, tokenizer, json.dumps(test["data"], ensure_ascii=False)):
                    continue
                found["accepted"] += 1
                if not test["valid"]:
                    wrong.append((name, json.dumps(test["data"]), "an invalid instance is accepted"))
    tally = generate(engine, tokenizer, schemas, len(schemas), MAX_TOKENS)
    return {
        "suite: temperature": TEMPERATURE,
        **{f"suite: {name}": count for name, count in found.items()},
        "suite: supported": len(schemas),
        "suite: wrongly accepted": len(wrong),
        "suite: answers valid": tally.valid,
        "suite: answers cut": tally.cut,
        "suite: answers invalid": len(tally.wrong),
        "suite: wrong": [*wrong, *tally.wrong][:20],
    }


def accepts(start: Any, tokenizer: Tokenizer, text: str) -> bool:
    """True when ``text`` is a whole answer of the grammar behind the matcher ``start``."""
    state, ids = start.deep_copy(), tokenizer.encode(text, add_special_tokens=False)
    return bool(state.try_consume_tokens(ids) == len(ids) and state.is_accepting())
