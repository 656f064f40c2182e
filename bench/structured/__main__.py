"""Structured output on the serving engine, without HTTP.

    python -m bench.structured artifact/                       # everything, with the bounds
    python -m bench.structured artifact/ --only validity       # 1,000 answers at temperature 1.2 over 60 schemas
    python -m bench.structured artifact/ --only suite          # JSON-Schema-Test-Suite, downloaded by pip
    python -m bench.structured artifact/ --only calls          # required and named tool calls

Sides alternate, so a slow phase of the machine slows both. Prints a table. ``--save-result`` writes a JSON with every
single measurement, the command and the environment. Exit code 1: a bound is missed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optkit
from bench.bounds import beyond, print_numbers
from bench.figures import command_line
from bench.structured import calls, neighbours, speed, suite, validity
from optkit.artifact.open import Artifact
from optkit.bench.environment import environment
from optkit.runtime.factory import open_engine
from optkit.text.tokenizer import Tokenizer

PARTS = ("validity", "suite", "calls", "neighbours", "compiling", "decoding", "forcing")
IN_PROCESS = {"validity", "suite", "neighbours", "decoding", "forcing"}  # parts on an engine in this process
MOST = {
    "invalid": 0,
    "suite: wrongly accepted": 0,
    "suite: answers invalid": 0,
    "calls: invalid": 0,
    "neighbours: changed answers": 0,
    "mask p50, us": 60,
    "mask p99, us": 1000,
    "compile p95, ms": 10,
    "hostile max, ms": 100,
    "1 client: TPOT ratio": 1.03,
    "8 clients: TPOT ratio": 1.06,
    "7 free and 1: TPOT ratio": 1.01,
}
LEAST = {"forced: gain": 1.3}


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line("bench.structured", __doc__)
    parser.add_argument("artifact")
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; may be repeated")
    parser.add_argument("--answers", type=int, default=1000, help="of the part validity")
    parser.add_argument("--calls", type=int, default=480, help="answers of the part calls")
    parser.add_argument("--suite", type=Path, help="folder of JSON-Schema-Test-Suite with the drafts")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save-result", type=Path)
    args = parser.parse_args(argv)
    parts = args.only or PARTS
    result = measure(args.artifact, parts, args.answers, args.rounds, args.suite)
    if "calls" in parts:
        with optkit.load(args.artifact, generation_config="none") as llm:
            result |= calls.run(llm.chat, args.calls)
    missed = missed_bounds(result)
    print_numbers(result, missed, 30, "10.3f")
    for name in ("wrong", "suite: wrong", "calls: wrong"):
        for problem in result.get(name, []):
            print("invalid:", *problem)
    if args.save_result:
        content = {"kind": "structured", "environment": environment(), "missed": missed, **result}
        args.save_result.write_text(json.dumps(content) + "\n")
    return 1 if missed else 0


def measure(
    artifact: str, parts: Sequence[str], answers: int, rounds: int, suite_folder: Path | None = None
) -> dict[str, Any]:
    """The results of ``parts`` without tool calls, by name."""
    tokenizer = Tokenizer.from_directory(Artifact.open(artifact).directory)
    result: dict[str, Any] = {}
    if "compiling" in parts:
        result |= speed.compiling(tokenizer)
    if IN_PROCESS.isdisjoint(parts):
        return result
    engine = open_engine(artifact, max_num_seqs=16)
    if "decoding" in parts:
        result |= speed.decoding(engine, tokenizer, rounds)
    if "forcing" in parts:
        result |= speed.forcing(engine, tokenizer, rounds)
    if "neighbours" in parts:
        result |= neighbours.run(engine, tokenizer, rounds)
    if "validity" in parts:
        result |= validity.run(engine, tokenizer, answers)
    if "suite" in parts:
        with tempfile.TemporaryDirectory() as folder:
            result |= suite.run(engine, tokenizer, suite_folder or suite.download(Path(folder)))
    return result


def missed_bounds(result: dict[str, Any]) -> list[str]:
    """The names of the results beyond their bounds."""
    return beyond(result, MOST, LEAST)


if __name__ == "__main__":
    sys.exit(main())
