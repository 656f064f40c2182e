"""Long answers with and without guesses: time, sameness and repetition of 20,000 tokens.

    python -m bench.long generation ARTIFACT             # 4 prompts of 5,000 greedy tokens each, then sampled answers
    python -m bench.long generation ARTIFACT --only sampled --tokens 1000

A model of 8,192 positions ends before 20,000 tokens, so several answers add up to 20,000, each without a restart. Stop
tokens are left out: both sides generate all tokens. The gain of a long answer comes from repetition, so the share of
different 4-grams stands beside each gain: repetitive text is fast and worth little. Sampled answers have temperature 1,
top_p 0.9 and a repetition penalty over the last tokens, with a line for each penalty. Exit code 1: a bound is missed.
"""

from __future__ import annotations

import json
import math
from typing import Any

from bench.bounds import beyond, print_numbers
from bench.long._answers import GUESSED, PLAIN, Answer, Chats, both, distinct, engines, load, parser
from optkit.bench.environment import environment
from optkit.runtime.types import SamplingParams

PROMPTS = (
    "Write a long story about a lighthouse keeper and the storm of 1862.",
    "Write a detailed textbook chapter on the history of navigation.",
    "Write a complete Python module that implements a text adventure game, with comments.",
    "Write a long dialogue between two engineers who design a bridge.",
)
PARTS = ("greedy", "sampled")
TOKENS, SAMPLED_TOKENS = 5000, 1000  # of an answer
PENALTIES = ((1.0, -1), (1.1, 1024), (1.2, 1024))  # factor, and how many tokens it looks back
MOST = {"greedy: time": 0.5, "different answers": 0}
LEAST = {f"sampled, penalty {factor:g}: gain": 1.0 for factor, _ in PENALTIES}


def main(arguments: list[str]) -> int:
    options = parser("generation", __doc__, PARTS)
    options.add_argument(
        "--tokens", type=int, default=None, help=f"of an answer: {TOKENS}, sampled {SAMPLED_TOKENS}"
    )
    options.add_argument("--prompts", type=int, default=len(PROMPTS), help="how many of the prompts")
    args = options.parse_args(arguments)
    sides = engines(args.artifact, args.method, max_num_seqs=1, num_speculative_tokens=args.guesses)
    chats = Chats(args.artifact)
    prompts = [chats.prompt([{"role": "user", "content": text}]) for text in PROMPTS[: args.prompts]]
    parts = args.only or PARTS
    result: dict[str, Any] = {"different answers": 0}
    if "greedy" in parts:
        greedy = SamplingParams(max_tokens=args.tokens or TOKENS, temperature=0.0)
        pairs = [both(sides, prompt, greedy, 1) for prompt in prompts]
        add(result, "greedy", pairs)
        result["greedy: time"] = 1 / result["greedy: gain"]
    for factor, last in PENALTIES if "sampled" in parts else ():
        pairs = []
        for seed, prompt in enumerate(prompts):
            params = SamplingParams(
                max_tokens=args.tokens or SAMPLED_TOKENS,
                temperature=1.0,
                top_p=0.9,
                seed=seed,
                repetition_penalty=factor,
                repeat_last_n=last,
            )
            pairs.append(both(sides, prompt, params, 1))
        add(result, f"sampled, penalty {factor:g}", pairs)
    missed = beyond(result, MOST, LEAST)
    print(load())
    print_numbers(result, missed, 44, "10.3f", MOST)
    if args.save_result:
        content = {"kind": "long-generation", "environment": environment(), "missed": missed, **result}
        args.save_result.write_text(json.dumps(content) + "\n")
    return 1 if missed else 0


def add(result: dict[str, Any], name: str, pairs: list[dict[str, Answer]]) -> None:
    """Add the sums and shares of ``pairs`` to ``result``, and the answers that differ."""
    plain, guessed = ([pair[side] for pair in pairs] for side in (PLAIN, GUESSED))
    result["different answers"] += sum(a.tokens != b.tokens for a, b in zip(plain, guessed, strict=True))
    result |= {
        f"{name}: tokens": sum(len(each.tokens) for each in guessed),
        f"{name}: plain, s": math.fsum(each.seconds for each in plain),
        f"{name}: guessed, s": math.fsum(each.seconds for each in guessed),
        f"{name}: gain": math.fsum(each.seconds for each in plain)
        / math.fsum(each.seconds for each in guessed),
        f"{name}: gain in CPU time": math.fsum(each.cpu_seconds for each in plain)
        / math.fsum(each.cpu_seconds for each in guessed),
        f"{name}: tokens a step": sum(each.steps for each in plain) / sum(each.steps for each in guessed),
        f"{name}: distinct-4": math.fsum(distinct(each.tokens) for each in guessed) / len(guessed),
    }
