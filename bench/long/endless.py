"""Sinks and a rolling window: memory, speed and loss of answers far beyond the context.

    python -m bench.long endless artifact/                   # everything, with the bounds
    python -m bench.long endless artifact/ --only loss       # the loss of text at 30,000 positions
    python -m bench.long endless artifact/ --sink-tokens 0   # what the sinks are for

``growth``: one answer of 20,000 tokens: blocks of KV and memory of the process along the way. ``speed``: steps of this
answer at its end and of another one at 2,000 tokens, in turn, in two engines of one process. ``loss``: the shipped
text, read as one prompt longer than the context. The loss of the last stretches, up to 30,000 positions, is compared
with the loss of the same tokens through the same window at the end of a text as long as the context: the bound, which
shows errors that add up. Beside it, without a bound, is the loss where all of that text is seen: what the window costs
at any position. Exit code 1: a bound is missed.
"""

from __future__ import annotations

import itertools
import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.bounds import beyond, print_numbers
from bench.figures import command_line
from optkit.runtime.engine import Engine
from optkit.runtime.factory import open_engine
from optkit.runtime.kv.rolling import RollingWindow
from optkit.runtime.types import EngineRequest, SamplingParams
from optkit.text.corpora import load_text
from optkit.text.load import load_tokenizer

PARTS = ("growth", "speed", "loss")
EARLY = 2_000  # tokens of an answer after which nothing may grow
TURN = 32  # steps of an engine before the other one's: those between two moves of the window
TURNS = 40
STRETCH, STRETCHES = 1024, 6  # tokens of a compared stretch of text, and the stretches at the end of the text
MOST = {
    "blocks after the first 2,000 tokens, largest less smallest": 0,
    "growth of memory, MB": 5.0,
    "TPOT ratio": 1.05,
    "loss at the end less at the context, nats": 0.1,
}


def main(arguments: Sequence[str]) -> int:
    parser = command_line("bench.long endless", __doc__)
    parser.add_argument("artifact")
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; may be repeated")
    parser.add_argument("--tokens", type=int, default=20_000, help="of the long answer")
    parser.add_argument("--positions", type=int, default=30_000, help="of the text")
    parser.add_argument("--rolling-window", type=int, default=1024)
    parser.add_argument("--sink-tokens", type=int, default=4)
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="of the answers")
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args(arguments)
    window, parts = RollingWindow(args.rolling_window, args.sink_tokens), args.only or PARTS
    result: dict[str, float] = {}
    engine = open_engine(args.artifact, threads=args.threads)
    if "growth" in parts or "speed" in parts:
        penalty = args.repetition_penalty
        answer = Answer(engine, window, args.tokens + TURN * (TURNS + 1), penalty)
        result |= growth(answer, args.tokens)
        if "speed" in parts:
            other = open_engine(args.artifact, threads=args.threads)
            result |= speed(Answer(other, window, EARLY + TURN * (TURNS + 1), penalty), answer)
    if "loss" in parts:
        tokenizer = load_tokenizer(args.artifact)
        ids = tokenizer(load_text("evaluation"), add_special_tokens=False).input_ids[: args.positions]
        result |= loss(engine, ids, window)
    missed = beyond(result, MOST)
    print_numbers(result, missed, 62, ",.3f", MOST)
    return int(bool(missed))


class Answer:
    """A sampled answer to a short prompt, a step at a time; ``length`` tokens so far."""

    def __init__(self, engine: Engine, window: RollingWindow, tokens: int, penalty: float = 1.0) -> None:
        self.engine, self.length = engine, 0
        params = SamplingParams(max_tokens=tokens, temperature=0.8, seed=1, repetition_penalty=penalty)
        prompt = tuple(range(1000, 1032))
        engine.add_request(
            EngineRequest(
                request_id="endless",
                prompt_ids=prompt,
                sampling=params,
                arrival=time.monotonic(),
                rolling=window,
            )
        )

    def step(self) -> None:
        self.length += sum(len(output.token_ids) for output in self.engine.step())

    def turn(self) -> float:
        """Seconds of ``TURN`` steps."""
        start = time.perf_counter()
        for _ in range(TURN):
            self.step()
        return time.perf_counter() - start


def rss_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def growth(answer: Answer, tokens: int) -> dict[str, float]:
    """Blocks and memory from ``EARLY`` tokens on, up to ``tokens``."""
    blocks, memory = list[int](), list[int]()
    while answer.length < tokens:
        answer.step()
        if answer.length >= EARLY and answer.length % 100 == 0:
            blocks.append(answer.engine.stats().kv_blocks_used)
            memory.append(rss_bytes())
    return {
        "tokens of the answer": answer.length,
        "blocks": blocks[-1],
        "KV, MB": blocks[-1] * answer.engine.block_bytes / 1e6,
        "blocks after the first 2,000 tokens, largest less smallest": max(blocks) - min(blocks),
        "growth of memory, MB": (memory[-1] - memory[0]) / 1e6,
    }


def speed(early: Answer, late: Answer) -> dict[str, float]:
    """The time per output token of two answers, in turn."""
    while early.length < EARLY:
        early.step()
    pairs = [(early.turn(), late.turn()) for _ in range(TURNS)]
    first, last = zip(*pairs, strict=True)
    return {
        f"TPOT at {early.length:,} tokens, ms": 1e3 * statistics.median(first) / TURN,
        f"TPOT at {late.length:,} tokens, ms": 1e3 * statistics.median(last) / TURN,
        "TPOT ratio": statistics.median(b / a for a, b in pairs),
    }


def loss(engine: Engine, ids: Sequence[int], window: RollingWindow) -> dict[str, float]:
    """The loss of the last stretches of a text, read in three ways: the same tokens each time, in other contexts.

    ``far`` is behind all of the text, ``near`` at the end of a full context of text, both through the window; ``full``
    at the end of a full context that is seen whole. Differences are of the means of stretches, with the standard error.
    """
    start = time.perf_counter()
    rolled = [0.0, *nll(engine, ids, window)]
    reading = time.perf_counter() - start
    context = engine.config.max_model_len - 1
    far, near, full = list[float](), list[float](), list[float]()
    for end in range(len(ids) - (STRETCHES - 1) * STRETCH, len(ids) + 1, STRETCH):
        text = ids[
            end - context - 1 : end
        ]  # as long as the context, so a window reads it as it reads longer texts
        read = (
            rolled[end - STRETCH : end],
            nll(engine, text, window)[-STRETCH:],
            nll(engine, text[1:])[-STRETCH:],
        )
        for losses, found in zip((far, near, full), read, strict=True):
            losses.append(statistics.fmean(found))
        print(f"{end:,} positions: {far[-1]:.3f}, {near[-1]:.3f}, {full[-1]:.3f} nats", flush=True)
    return {
        "reading through the window, ms a token": 1e3 * reading / len(ids),
        f"loss at {len(ids):,} positions, nats": statistics.fmean(far),
        f"loss of the same tokens at {context + 1:,} positions, nats": statistics.fmean(near),
        f"loss of the same tokens with all {context:,} tokens seen, nats": statistics.fmean(full),
        "loss at the end less at the context, nats": mean_difference(far, near)[0],
        "loss at the end less at the context, standard error": mean_difference(far, near)[1],
        "loss at the end less with all tokens seen, nats": mean_difference(far, full)[0],
        "loss at the end less with all tokens seen, standard error": mean_difference(far, full)[1],
    }


def mean_difference(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """The mean of the differences of pairs, and the standard error of the mean."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    return statistics.fmean(differences), statistics.stdev(differences) / len(differences) ** 0.5


def nll(engine: Engine, ids: Sequence[int], window: RollingWindow | None = None) -> list[float]:
    """The loss of each of ``ids`` but the first."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    engine.add_request(
        EngineRequest(
            request_id="text",
            prompt_ids=tuple(ids),
            sampling=params,
            arrival=time.monotonic(),
            rolling=window,
        )
    )
    return [-score for score in itertools.chain.from_iterable(scores(engine))]


def scores(engine: Engine) -> Iterator[list[float]]:
    """The logprobs of the prompt's tokens, step by step."""
    while engine.has_work:
        for output in engine.step():
            yield [each.logprob for each in output.prompt_logprobs if each.logprob is not None]
