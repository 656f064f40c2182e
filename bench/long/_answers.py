"""Answers of two engines side by side: with guesses and without, the same prompts in turn."""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.figures import command_line
from optkit.artifact.open import Artifact
from optkit.runtime.engine import Engine
from optkit.runtime.factory import open_engine
from optkit.runtime.sampling.tree_speculator import TreeSpeculator
from optkit.runtime.types import EngineRequest, FinishReason, SamplingParams
from optkit.text.tokenizer import Tokenizer

PROMPTS = Path(__file__).with_name("prompts.json")
PLAIN, GUESSED = "plain", "guessed"


def parser(name: str, description: str | None, parts: Sequence[str]) -> argparse.ArgumentParser:
    """The options of a figure of answers with and without guesses; ``parts`` are the values of ``--only``."""
    made = command_line(f"bench.long {name}", description)
    made.add_argument("artifact")
    made.add_argument("--only", choices=parts, action="append", help="a part; may be repeated")
    made.add_argument("--method", default="suffix", help="a value of --speculative-model")
    made.add_argument("--guesses", type=int, default=None, help="most guesses of a step")
    made.add_argument("--save-result", type=Path)
    return made


@dataclass(frozen=True)
class Answer:
    """The tokens and steps of an answer, and the seconds after the first token, by the clock and of the process."""

    tokens: list[int]
    seconds: float
    cpu_seconds: float
    steps: int

    def with_best(self, other: Answer) -> Answer:
        """The faster of two runs of an answer.

        Raises:
            ValueError: the tokens differ.
        """
        if self.tokens != other.tokens:
            raise ValueError("two runs of one side gave different answers")
        return self if self.seconds <= other.seconds else other


def engines(artifact: str, method: str, **options: Any) -> dict[str, Engine]:
    """An engine without guesses and one with."""
    return {
        PLAIN: open_engine(artifact, speculative_model="none", **options),
        GUESSED: open_engine(artifact, speculative_model=method, **options),
    }


def answer(engine: Engine, prompt: Sequence[int], sampling: SamplingParams) -> Answer:
    """The answer of ``engine`` alone, timed from the first token on.

    Raises:
        RuntimeError: the request failed.
    """
    request = EngineRequest(
        request_id="answer", prompt_ids=tuple(prompt), sampling=sampling, arrival=time.monotonic()
    )
    engine.add_request(request)
    tokens: list[int] = []
    start = cpu = 0.0
    counts = engine.scheduler.step_sizes.counts
    first = 0
    while engine.has_work:
        outputs = engine.step()
        for output in outputs:
            if output.finish_reason is FinishReason.ERROR:
                raise RuntimeError(output.error)
            tokens += output.token_ids
        if outputs and not start:
            start, cpu, first = time.perf_counter(), time.process_time(), sum(counts)
    return Answer(tokens, time.perf_counter() - start, time.process_time() - cpu, sum(counts) - first)


class Learned:
    """The tables of an engine's source of guesses, as filled so far."""

    NAMES = ("shared", "chances")

    def __init__(self, engine: Engine) -> None:
        self.proposer = engine.scheduler.proposer
        names = self.NAMES if isinstance(self.proposer, TreeSpeculator) else ()
        self.values = {name: copy.deepcopy(getattr(self.proposer, name)) for name in names}

    def restore(self) -> None:
        """Go back to the first state."""
        for name, value in self.values.items():
            setattr(self.proposer, name, copy.deepcopy(value))


def both(
    sides: dict[str, Engine], prompt: Sequence[int], sampling: SamplingParams, rounds: int
) -> dict[str, Answer]:
    """The best run of each side in ``rounds``, which begin with either side in turn.

    No run knows an earlier run of the same prompt: each starts with the tables before the first run.

    Raises:
        ValueError: two runs of a side differ.
    """
    best: dict[str, Answer] = {}
    learned = {side: Learned(engine) for side, engine in sides.items()}
    for number in range(rounds):
        for side in list(sides)[:: 1 if number % 2 == 0 else -1]:
            learned[side].restore()
            found = answer(sides[side], prompt, sampling)
            best[side] = best[side].with_best(found) if side in best else found
    return best


def distinct(tokens: Sequence[int], n: int = 4) -> float:
    """The share of the n-grams of ``tokens`` that are different: 1 without a repetition."""
    count = len(tokens) - n + 1
    return len({tuple(tokens[at : at + n]) for at in range(count)}) / max(count, 1)


class Chats:
    """Prompts in the artifact's chat template."""

    def __init__(self, artifact: str) -> None:
        self.directory = Artifact.open(artifact, verify=False).directory
        self.tokenizer = Tokenizer.from_directory(self.directory)

    def prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The tokens of a prompt for the next answer."""
        template = self.tokenizer.chat_template
        if template is None:
            return self.tokenizer.encode("\n\n".join(message["content"] for message in messages) + "\n")
        text = template.render(list(messages), add_generation_prompt=True)
        return self.tokenizer.encode(text, add_special_tokens=False)


def kinds() -> dict[str, list[list[str]]]:
    """The turns of each prompt of each kind."""
    found: dict[str, list[list[str]]] = json.loads(PROMPTS.read_text(encoding="utf-8"))
    return found


def load() -> str:
    """The load average, in words."""
    return "load average " + ", ".join(f"{each:.2f}" for each in os.getloadavg())
