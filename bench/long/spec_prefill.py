"""SpecPrefill: TTFT with a part of the prompt against the whole prompt, and the log-probability of needles.

    python -m bench.long spec_prefill artifact/
    python -m bench.long spec_prefill artifact/ --tokens 1900 --keep 0.25 --rounds 5 --needles 0
    python -m bench.long spec_prefill artifact/ --layers 4 --needles 10

TTFT: one engine, prompts of the evaluation text, the same prompt whole and with ``--keep`` of its tokens in turn,
without prefix cache. The ratio is the median over rounds; CPU time is the second witness. Needles: a number is
somewhere in a long text, a question on it at the end; the log-probability of the whole answer, with the whole prompt,
the kept tokens, and as many of the last tokens (``tail``), which need no model. Exit code 1: a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.bounds import beyond, print_numbers
from bench.figures import command_line
from bench.long._prefill import Texts, answer_logprob, in_turn, kl, load_average, ratios
from optkit.runtime.engine import Engine
from optkit.runtime.factory import open_engine
from optkit.runtime.runner import ModelRunner
from optkit.runtime.specprefill.scoring import Scoring
from optkit.runtime.specprefill.settings import SpecPrefill
from optkit.runtime.types import EngineRequest, SamplingParams, TokenOutput

MOST = {1900: 0.6, 8192: 0.5}  # of the TTFT of the whole prompt, by length
MARGIN = 32  # tokens of a context left for the answer
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)


def first_token(engine: Engine, name: str, prompt: Sequence[int], keep: float | None) -> TokenOutput:
    """Run a prompt up to its first token."""
    choice = SpecPrefill(enabled=keep is not None, keep_pct=keep)
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    engine.add_request(
        EngineRequest(
            request_id=name,
            prompt_ids=tuple(prompt),
            sampling=sampling,
            arrival=time.monotonic(),
            specprefill=choice,
        )
    )
    outputs: list[TokenOutput] = []
    while engine.has_work:
        outputs += engine.step()
    if outputs[-1].error:
        raise SystemExit(outputs[-1].error)
    return outputs[-1]


def ttft(engine: Engine, texts: Texts, tokens: int, keep: float, rounds: int) -> dict[str, float]:
    """Ratios of the TTFT of prompts of ``tokens`` tokens."""
    kept: list[int] = []

    def part(number: int) -> None:
        first = first_token(engine, f"part-{number}", texts.prompt(tokens, number), keep).first
        if first is None or first.kept_tokens is None:
            raise SystemExit("the prompt was computed whole")
        kept.append(first.kept_tokens)

    pairs = in_turn(
        lambda number: first_token(engine, f"whole-{number}", texts.prompt(tokens, number), None),
        part,
        rounds,
    )
    return ratios(pairs) | {"kept": statistics.mean(kept) / tokens, "load": load_average()}


def needles(engine: Engine, texts: Texts, tokens: int, keep: float, count: int) -> dict[str, float]:
    """Mean log-probabilities of answers, in nats, and the KL divergence behind the prompt."""
    scorer, runner = engine.specprefill.scorer(), engine.runner
    if not isinstance(runner, ModelRunner):
        raise SystemExit("the engine has no model in this process")
    model, rows = runner.model, list[dict[str, float]]()
    for number in range(count):
        question = texts.question(tokens, number, DEPTHS[number % len(DEPTHS)])
        whole, expected = answer_logprob(model, question)
        size = int(keep * tokens)
        scoring, positions = Scoring.of(question.prompt, size), None
        while positions is None:
            positions = scorer.advance(scoring, tokens)
        part, found = answer_logprob(model, question, positions.kept.tolist())
        tail, _ = answer_logprob(model, question, range(tokens - size, tokens))
        rows.append({"whole": whole, "part": part, "tail": tail, "kl": float(kl(expected, found))})
        print(
            f"  {tokens} tokens, needle {number}: "
            + json.dumps({k: round(v, 3) for k, v in rows[-1].items()})
        )
    return {f"needle_{name}": statistics.mean(row[name] for row in rows) for name in rows[0]}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = command_line("bench.long spec_prefill", __doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1900, 8192], help="lengths of prompts")
    parser.add_argument("--keep", type=float, default=0.25, help="share of the tokens to keep")
    parser.add_argument("--layers", type=int, help="scoring layers; default: a quarter of the model's")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of prefills of each length; 0: none")
    parser.add_argument("--needles", type=int, default=5, help="questions of each length; 0: none")
    parser.add_argument("--threads", type=int, default=0, help="0: the recipe's")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    given: dict[str, Any] = {"enable_prefix_caching": False, "speculative_model": "none"}
    engine = open_engine(
        str(args.artifact), **given, specprefill_layers=args.layers, specprefill_threshold=256
    )
    if args.threads:
        torch.set_num_threads(args.threads)
    texts, missed = Texts(args.artifact), list[str]()
    engine.specprefill.prepare()
    for asked in args.tokens:
        tokens = min(asked, engine.config.max_model_len - MARGIN)
        result: dict[str, float] = {"tokens": tokens}
        if args.rounds:
            result |= ttft(engine, texts, tokens, args.keep, args.rounds)
        if args.needles:
            result |= needles(engine, texts, tokens, args.keep, args.needles)
        most = {"ratio": MOST[asked]} if asked in MOST and args.keep == 0.25 else {}
        late = beyond(result, most)
        print_numbers(result, late, 16, ".3f", most)
        missed += late
    return 1 if missed else 0
