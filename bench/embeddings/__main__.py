"""Embeddings on the serving engine, without HTTP.

    python -m bench.embeddings artifact/ --model smollm2-135m      # everything, with the bounds
    python -m bench.embeddings artifact/ --only speed              # 64 texts together and in turn

A batch reads the weights once for all texts. The gain is large where a single text is bound by reading weights (few
tokens, on a CPU), and none elsewhere. Sides alternate, so a slow phase of the machine slows both. Prints a table.
``--save-result`` writes a JSON with every single measurement, the command and the environment. Exit code 1: a bound is
missed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.bounds import beyond, print_numbers
from bench.embeddings import measure
from bench.figures import command_line
from optkit.artifact.open import Artifact
from optkit.bench.environment import environment
from optkit.checkpoint.locate import resolve
from optkit.runtime.factory import open_engine
from optkit.runtime.pooling import POOLINGS
from optkit.text.tokenizer import Tokenizer

PARTS = ("fidelity", "speed")
MOST = {f"quantized, {length} tokens: batch differs": 0 for length in measure.LENGTHS}
LEAST = {
    **{f"float, {pooling}: min cosine": 0.9999 for pooling in POOLINGS},
    **{f"quantized, {pooling}: min cosine": 0.999 for pooling in POOLINGS},
    **{f"{length} tokens: gain": 0.9 for length in measure.LENGTHS},
    f"{min(measure.LENGTHS)} tokens: gain": 3.0,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line("bench.embeddings", __doc__)
    parser.add_argument("artifact")
    parser.add_argument("--model", help="the artifact's model, for the part fidelity: a name or a directory")
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; may be repeated")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save-result", type=Path)
    args = parser.parse_args(argv)
    parts = args.only or PARTS
    if "fidelity" in parts and not args.model:
        parser.error("the part fidelity needs --model")
    result = run(args.artifact, args.model, parts, args.rounds)
    missed = missed_bounds(result)
    print_numbers(result, missed, 34, "12.6f")
    if args.save_result:
        content = {"kind": "embeddings", "environment": environment(), "missed": missed, **result}
        args.save_result.write_text(json.dumps(content) + "\n")
    return 1 if missed else 0


def run(artifact: str, model: str | None, parts: Sequence[str], rounds: int) -> dict[str, Any]:
    """The results of ``parts``, by name."""
    opened = Artifact.open(artifact)
    tokenizer = Tokenizer.from_directory(opened.directory)
    prompts = measure.texts(tokenizer)
    engine = open_engine(artifact)
    quantized = measure.is_quantized(opened.graph())
    result = measure.first_call(engine, prompts[0])
    if "fidelity" in parts and model:
        directory = resolve(model).directory
        result |= measure.fidelity(engine, prompts, directory, quantized)
    if "speed" in parts:
        for length in measure.LENGTHS:
            result |= measure.speed(engine, measure.texts(tokenizer, (length,)), rounds, quantized)
    return result


def missed_bounds(result: dict[str, Any]) -> list[str]:
    """The names of the results beyond their bounds."""
    return beyond(result, MOST, LEAST)


if __name__ == "__main__":
    sys.exit(main())
