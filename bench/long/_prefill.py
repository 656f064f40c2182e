"""Prompts, times and log-probabilities for the figures of prefill policies."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from optkit.runtime.runner import ModelRunner, ServableModel
from optkit.runtime.specprefill.positions import Positions
from optkit.runtime.types import Batch, EngineRequest, Request, SamplingParams, ScheduledRequest
from optkit.text.corpora import load_text
from optkit.text.tokenizer import Tokenizer

BLOCK_SIZE = 32
CITIES = ("Lisbon", "Oslo", "Cairo", "Lima", "Quito", "Delhi", "Seoul", "Hanoi", "Accra", "Turin")


@dataclass(frozen=True)
class Question:
    """A prompt with a fact somewhere in a long text, a question on it at the end, and the answer's tokens."""

    prompt: list[int]
    answer: list[int]


class Texts:
    """Prompts of the shipped evaluation text, in tokens of the model in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = Tokenizer.from_directory(directory)
        self.ids = self.encode(load_text("evaluation"))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def prompt(self, tokens: int, number: int) -> list[int]:
        """``tokens`` tokens of text, another part for each ``number``."""
        start = random.Random(number).randrange(max(1, len(self.ids) - tokens))
        found = self.ids[start : start + tokens]
        if len(found) < tokens:
            raise SystemExit(f"the text has {len(self.ids)} tokens, fewer than {tokens}")
        return found

    def question(self, tokens: int, number: int, depth: float) -> Question:
        """A prompt of ``tokens`` tokens with a needle at ``depth``, from 0 (the beginning) to 1."""
        draw = random.Random(1000 + number)
        city, secret = draw.choice(CITIES), str(draw.randrange(1_000_000, 10_000_000))
        needle = self.encode(f"\nOne of the special magic numbers for {city} is: {secret}.\n")
        asked = f"\nWhat is the special magic number for {city}? The special magic number for {city} is:"
        question, answer = self.encode(asked), self.encode(f" {secret}")
        hay = self.prompt(tokens - len(needle) - len(question), number)
        place = int(depth * len(hay))
        return Question([*hay[:place], *needle, *hay[place:], *question], answer)


def logprobs(
    model: ServableModel, ids: Sequence[int], last: int, positions: Positions | None = None, step: int = 2048
) -> Tensor:
    """Log-probabilities [last, V] after the last tokens of ``ids``, computed in steps of ``step`` tokens."""
    received = EngineRequest(request_id="", prompt_ids=(), sampling=SamplingParams(max_tokens=1), arrival=0.0)
    request = Request(received, list(ids), positions=positions)
    blocks = -(-len(ids) // BLOCK_SIZE)
    request.block_tables = [list(range(blocks))]
    runner, rows = ModelRunner(model, blocks, BLOCK_SIZE), torch.empty(0)
    while request.num_computed < len(ids):
        left = len(ids) - request.num_computed
        count = min(step, left - last) if left > last else left
        item = ScheduledRequest(request, count, all_logits=left <= last)
        rows = torch.from_numpy(runner.execute(Batch((item,))))
        request.num_computed += count
    return rows.float().log_softmax(-1)


def answer_logprob(
    model: ServableModel, question: Question, kept: Sequence[int] | None = None
) -> tuple[float, Tensor]:
    """The log-probability of the whole answer, and the distribution [V] behind the prompt.

    Args:
        kept: the positions of the prompt's tokens to compute; None for all.
    """
    prompt, positions = question.prompt, None
    if kept is not None:
        positions = Positions.of(kept, prompt)
        prompt = [prompt[at] for at in kept]
    rows = logprobs(model, [*prompt, *question.answer], len(question.answer) + 1, positions)[:-1]
    return float(rows.gather(1, torch.tensor(question.answer)[:, None]).sum()), rows[0]


def kl(expected: Tensor, found: Tensor) -> Tensor:
    """KL divergence in nats of log-probabilities, over the last dimension."""
    return (expected.exp() * (expected - found)).sum(-1)


@dataclass(frozen=True)
class Pair:
    """Seconds of two ways to do the same, by the clock and of the process's CPU time."""

    base: tuple[float, float]
    other: tuple[float, float]


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of ``work`` by the clock, and CPU seconds of the process."""
    clock, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - clock, time.process_time() - cpu


def in_turn(base: Callable[[int], object], other: Callable[[int], object], rounds: int) -> list[Pair]:
    """Times of both, in turn and in changing order; the argument is the number of the round."""
    pairs = []
    for number in range(rounds):
        if number % 2:
            second, first = timed(lambda n=number: other(n)), timed(lambda n=number: base(n))  # type: ignore[misc]
        else:
            first, second = timed(lambda n=number: base(n)), timed(lambda n=number: other(n))  # type: ignore[misc]
        pairs.append(Pair(first, second))
    return pairs


def ratios(pairs: Sequence[Pair]) -> dict[str, float]:
    """Medians of the ratios other / base by clock and CPU time, and of the least times, in milliseconds."""
    return {
        "base_ms": 1e3 * min(pair.base[0] for pair in pairs),
        "other_ms": 1e3 * min(pair.other[0] for pair in pairs),
        "ratio": statistics.median(pair.other[0] / pair.base[0] for pair in pairs),
        "best_ratio": min(pair.other[0] for pair in pairs) / min(pair.base[0] for pair in pairs),
        "cpu_ratio": min(pair.other[1] for pair in pairs) / min(pair.base[1] for pair in pairs),
    }


def load_average() -> float:
    """The machine's load over the last minute."""
    return os.getloadavg()[0]
