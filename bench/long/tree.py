"""Guesses in trees on six kinds of prompts: the speed of greedy answers with and without, in turn.

    python -m bench.long tree ARTIFACT                 # the six kinds of bench/long/prompts.json, two rounds
    python -m bench.long tree ARTIFACT --only rows     # what a step of 2 to 32 rows costs against a single row
    python -m bench.long tree ARTIFACT --method ngram  # another source of guesses

The kinds are as in Spec-Bench: conversation in two turns, translation, summary, question answering, mathematics,
and answers from passages. Prompts are our own. Both sides must give the same tokens; the time counts from the first
token on, the best of the rounds, so prefill is left out. Exit code 1: a bound is missed.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

from bench.bounds import beyond, print_numbers
from bench.long._answers import GUESSED, PLAIN, Answer, Chats, both, engines, kinds, load, parser
from optkit.bench.environment import environment
from optkit.runtime.engine import Engine
from optkit.runtime.factory import open_engine
from optkit.runtime.types import Batch, EngineRequest, SamplingParams, ScheduledRequest

PARTS = ("rows", "kinds")
TOKENS = 256  # of an answer, at most
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CONTEXTS = (256, 2000)
LEAST = {"mean": 1.5, "least kind": 0.97}
SAME = {"different answers": 0}


def main(arguments: list[str]) -> int:
    options = parser("tree", __doc__, PARTS)
    options.add_argument("--tokens", type=int, default=TOKENS, help="of an answer, at most")
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--kind", action="append", help="one of the six kinds; may be repeated")
    args = options.parse_args(arguments)
    parts = args.only or PARTS
    result: dict[str, Any] = {}
    if "rows" in parts:
        result |= rows(args.artifact)
    if "kinds" in parts:
        result |= measure(args.artifact, args.method, args.guesses, args.tokens, args.rounds, args.kind)
    missed = beyond(result, SAME, LEAST)
    print(load())
    print_numbers(result, missed, 34, "10.3f", SAME)
    if args.save_result:
        content = {"kind": "long-tree", "environment": environment(), "missed": missed, **result}
        args.save_result.write_text(json.dumps(content) + "\n")
    return 1 if missed else 0


def rows(artifact: str) -> dict[str, float]:
    """The time of steps with several rows of a sequence, as multiples of the step with a single row."""
    engine = open_engine(artifact, speculative_model="none", max_num_seqs=1)
    found = {}
    for context in CONTEXTS:
        seconds = step_seconds(engine, context)
        for count in ROWS:
            found[f"step of {count} rows after {context}"] = seconds[count] / seconds[ROWS[0]]
    return found


def step_seconds(engine: Engine, context: int, repeats: int = 12) -> dict[int, float]:
    """The least seconds of a step of each number of rows, measured in turn."""
    ids = [1000 + at * 7919 % 20000 for at in range(context)]
    ids = [token % engine.runner.vocab_size for token in ids]
    params = SamplingParams(max_tokens=ROWS[-1] + 2, temperature=0.0)
    asked = EngineRequest(request_id="rows", prompt_ids=tuple(ids), sampling=params, arrival=time.monotonic())
    engine.add_request(asked)
    while not engine.step():
        pass
    request = engine.scheduler.running[0]
    engine.scheduler.kv.grow(request, len(request.token_ids) + ROWS[-1], engine.config.max_model_len)
    best = dict.fromkeys(ROWS, float("inf"))
    for _ in range(repeats):
        for count in ROWS:
            start = time.perf_counter()
            engine.runner.execute(Batch((ScheduledRequest(request, count, tuple(ids[: count - 1])),)))
            best[count] = min(best[count], time.perf_counter() - start)
    engine.abort("rows")
    return best


def measure(
    artifact: str,
    method: str,
    guesses: int | None,
    tokens: int,
    rounds: int,
    only: Sequence[str] | None = None,
) -> dict[str, Any]:
    """The gain of each kind, and their mean: plain seconds over seconds with guesses."""
    sides = engines(artifact, method, max_num_seqs=1, num_speculative_tokens=guesses)
    chats = Chats(artifact)
    eos = tuple(chats.tokenizer.eos_ids)
    greedy = SamplingParams(max_tokens=tokens, temperature=0.0, stop_token_ids=eos)
    result: dict[str, Any] = {}
    gains, cpu_gains, worst, wrong = list[float](), list[float](), float("inf"), 0
    for kind, prompts in kinds().items():
        if only and kind not in only:
            continue
        pairs: list[dict[str, Answer]] = []
        for turns in prompts:
            messages: list[dict[str, str]] = []
            for turn in turns:
                messages.append({"role": "user", "content": turn})
                pairs.append(both(sides, chats.prompt(messages), greedy, rounds))
                text = chats.tokenizer.decode(pairs[-1][PLAIN].tokens)
                messages.append({"role": "assistant", "content": text})
        wrong += sum(pair[PLAIN].tokens != pair[GUESSED].tokens for pair in pairs)
        pairs = [pair for pair in pairs if pair[PLAIN].steps > 1]
        gains.append(ratio([(p[PLAIN].seconds, p[GUESSED].seconds) for p in pairs]))
        cpu_gains.append(ratio([(p[PLAIN].cpu_seconds, p[GUESSED].cpu_seconds) for p in pairs]))
        worst = min(worst, *(p[PLAIN].seconds / p[GUESSED].seconds for p in pairs))
        result[f"{kind}: gain"] = gains[-1]
        result[f"{kind}: gain in CPU time"] = cpu_gains[-1]
        result[f"{kind}: tokens a step"] = ratio([(p[PLAIN].steps, p[GUESSED].steps) for p in pairs])
    result |= {
        "mean": statistics.mean(gains),
        "mean in CPU time": statistics.mean(cpu_gains),
        "least kind": min(gains),
        "least answer": worst,
        "different answers": wrong,
    }
    return result


def ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """The sum of the first numbers over the sum of the second."""
    return sum(a for a, _ in pairs) / max(sum(b for _, b in pairs), 1e-9)
