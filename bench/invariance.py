"""Test whether tokens depend on the batch, or on the chunks of a prompt.

    python bench/invariance.py artifact/ --prompts 100

Greedy tokens of each prompt alone, unchunked, are the reference. The same prompts then run 4 and 16 at a time, and
with chunks of 37 and 128 tokens, through the serving engine. Prints the number of identical prompts; exit code 1 for
any difference. The claim is exact equality, so a single run proves or refutes the claim, without averages.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench.figures import command_line
from optkit.artifact.open import Artifact
from optkit.runtime.factory import open_engine
from optkit.runtime.types import SamplingParams
from optkit.text.corpora import load_text
from optkit.text.load import load_tokenizer

BATCHES = ((4, 2048), (16, 2048), (1, 37), (4, 128), (16, 37))  # sequences at once, tokens a step


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line("bench.invariance", __doc__)
    parser.add_argument("artifact")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--output-len", type=int, default=16)
    args = parser.parse_args(argv)
    prompts = texts(args.artifact, args.prompts)
    expected = answers(args.artifact, prompts, args.output_len, 1, 2048)
    worst = len(prompts)
    for sequences, tokens in BATCHES:
        got = answers(args.artifact, prompts, args.output_len, sequences, tokens)
        same = sum(a == b for a, b in zip(got, expected, strict=True))
        print(
            f"{sequences:2} at a time, {tokens:4} tokens a step: {same}/{len(prompts)} identical", flush=True
        )
        worst = min(worst, same)
    return 0 if worst == len(prompts) else 1


def texts(artifact: str, count: int) -> list[list[int]]:
    """Pieces of the held-out text of 8 to 300 tokens, each from another place."""
    tokenizer = load_tokenizer(str(Artifact.open(artifact).directory))
    ids = tokenizer(load_text("evaluation"), add_special_tokens=False).input_ids
    step = (len(ids) - 300) // count
    return [ids[i * step : i * step + 8 + 37 * i % 293] for i in range(count)]


def answers(
    artifact: str, prompts: list[list[int]], length: int, sequences: int, tokens: int
) -> list[list[int]]:
    options = {"max_num_seqs": sequences, "max_num_batched_tokens": tokens, "max_model_len": 512}
    engine = open_engine(artifact, **options)
    return engine.generate(prompts, SamplingParams(max_tokens=length, temperature=0.0))


if __name__ == "__main__":
    sys.exit(main())
