"""Training of adapters by a teacher's distributions, within a budget of time, resumable.

AdamW on a window a step, in an order drawn anew for each pass over the text. The learning rate rises for a few
steps and falls along half a cosine over the *budget*: the end is reached at the end of the time, however fast the
machine. Adapters, optimizer and the seconds spent are written once a minute; a killed run goes on from there, and a
budget is spent once.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from optkit.passes.base import Progress
from optkit.passes.distillation.differentiable import Differentiable
from optkit.passes.distillation.teacher import Teacher, divergence
from optkit.passes.quantization.resume import read, whole, write

WARM_UP = 10  # steps
LAST_RATE = 0.02  # of the learning rate, at the end of the budget
BETAS, LARGEST_GRADIENT = (0.9, 0.95), 1.0
SAVE_SECONDS = 60.0
STATE = "training.safetensors"


@dataclass
class Trained:
    """Steps, seconds and the mean divergence of the last pass over the text."""

    steps: int = 0
    seconds: float = 0.0
    loss: float = math.nan


class Training:
    """Trains ``student`` by ``teacher`` on windows ``indices`` of the teacher's text.

    Args:
        seconds: the budget.
        rate: the highest learning rate.
        directory: where the state is kept; None keeps nothing.
        clock: gives seconds; another one in tests.
    """

    def __init__(
        self,
        student: Differentiable,
        teacher: Teacher,
        indices: Sequence[int],
        seconds: float,
        rate: float,
        directory: Path | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.student, self.teacher, self.indices = student, teacher, list(indices)
        self.budget, self.rate, self.directory, self.seed, self.clock = seconds, rate, directory, seed, clock
        self.optimizer = torch.optim.AdamW(student.parameters(), lr=rate, betas=BETAS, weight_decay=0.0)
        self.done = Trained()

    def run(self, progress: Progress, name: str) -> Trained:
        """Train until the budget is spent."""
        self.restore()
        before, saved = self.clock() - self.done.seconds, self.done.seconds
        while self.done.seconds < self.budget:
            loss = self.step()
            weight = max(1 / (self.done.steps + 1), 0.05)
            self.done.loss = loss if self.done.steps == 0 else (1 - weight) * self.done.loss + weight * loss
            self.done.steps += 1
            self.done.seconds = self.clock() - before
            part = (min(int(self.done.seconds), int(self.budget)), max(1, int(self.budget)))
            progress(f"{name}: step {self.done.steps}, divergence {self.done.loss:.4f}", part=part)
            if self.done.seconds - saved >= SAVE_SECONDS:
                self.save()
                saved = self.done.seconds
        self.save()
        return self.done

    def step(self) -> float:
        """A step on the next window; returns the divergence before the step."""
        index = self.window(self.done.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate_now()
        ids, log_probabilities = self.teacher(index)
        logits = self.student.logits(torch.tensor([self.teacher.windows[index]]))
        loss = divergence(ids, log_probabilities, logits)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), LARGEST_GRADIENT)
        self.optimizer.step()
        return float(loss.detach())

    def window(self, step: int) -> int:
        """The window of ``step``: all windows in an order of their own for each pass over the text."""
        turn, place = divmod(step, len(self.indices))
        order = list(self.indices)
        random.Random(f"{self.seed}-{turn}").shuffle(order)
        return order[place]

    def rate_now(self) -> float:
        """The learning rate, by the time spent."""
        warm = min(1.0, (self.done.steps + 1) / WARM_UP)
        spent = min(1.0, self.done.seconds / self.budget)
        return self.rate * warm * (LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * spent)))

    # -- the state on disk ---------------------------------------------------------------------------------------

    def save(self) -> None:
        if self.directory is None:
            return
        tensors: dict[str, Tensor] = {
            "done": torch.tensor([self.done.steps, self.done.seconds, self.done.loss], dtype=torch.float64)
        }
        for index, parameter in enumerate(self.student.parameters()):
            tensors[f"{index}.value"] = parameter.detach()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{index}.{key}"] = value
        write(self.directory / STATE, tensors)

    def restore(self) -> None:
        """Stand where an earlier run of the same training stood."""
        if self.directory is None or not whole(self.directory / STATE):
            return
        tensors = read(self.directory / STATE)
        steps, seconds, loss = tensors.pop("done").tolist()
        self.done = Trained(int(steps), seconds, loss)
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            number, _, name = key.partition(".")
            state.setdefault(int(number), {})[name] = value
        with torch.no_grad():
            for index, parameter in enumerate(self.student.parameters()):
                parameter.copy_(state[index].pop("value"))
        kept = self.optimizer.state_dict()
        kept["state"] = {number: found for number, found in state.items() if found}
        self.optimizer.load_state_dict(kept)


@torch.no_grad()
def mean_divergence(student: Differentiable, teacher: Teacher, indices: Sequence[int]) -> float:
    """The mean divergence of ``student`` on windows ``indices``."""
    losses = [
        float(divergence(*teacher(index), student.logits(torch.tensor([teacher.windows[index]]))))
        for index in indices
    ]
    return sum(losses) / len(losses)
