"""A teacher's distributions on disk: for each token the most likely next tokens, and the probability of the rest.

``top`` tokens hold nearly all of the probability, and take 6 bytes each instead of 4 bytes for each token of the
vocabulary. The rest is a further event, and the divergence from a student counts all of the probability: the
Kullback-Leibler divergence after the rest of the vocabulary has become a single token, a lower bound of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from optkit.passes.quantization.resume import read, whole, write

LEAST = 1e-7  # of the probability of all other tokens


class Teacher:
    """Distributions of windows by index, computed on first use.

    Args:
        logits: gives logits [L, V] of a window of token ids.
        directory: where distributions are kept; None keeps them in memory.
    """

    def __init__(
        self,
        logits: Callable[[list[int]], Tensor],
        windows: list[list[int]],
        top: int,
        directory: Path | None,
    ) -> None:
        self.logits, self.windows, self.top, self.directory = logits, windows, top, directory
        self.kept: dict[int, dict[str, Tensor]] = {}

    def __call__(self, index: int) -> tuple[Tensor, Tensor]:
        """Token ids [L, top] and log probabilities [L, top] of window ``index``."""
        found = self.load(index)
        return found["ids"].long(), found["log_probabilities"].float()

    def load(self, index: int) -> dict[str, Tensor]:
        if index in self.kept:
            return self.kept[index]
        file = None if self.directory is None else self.directory / f"teacher-{index:05d}.safetensors"
        if file is not None and whole(file):
            return read(file)
        found = distribution(self.logits(self.windows[index]), self.top)
        if file is not None:
            write(file, found)
        else:
            self.kept[index] = found
        return found


@torch.no_grad()
def distribution(logits: Tensor, top: int) -> dict[str, Tensor]:
    """The ``top`` most likely tokens of each row of ``logits`` [L, V]: ids int32, log probabilities float16."""
    values, ids = (logits.float() - logits.float().logsumexp(-1, keepdim=True)).topk(top)
    return {"ids": ids.to(torch.int32), "log_probabilities": values.to(torch.float16)}


def divergence(ids: Tensor, log_probabilities: Tensor, logits: Tensor) -> Tensor:
    """The mean KL divergence, in nats, of a student's ``logits`` [L, V] from a teacher's distributions [L, top]."""
    student = logits.gather(1, ids) - logits.logsumexp(-1, keepdim=True)
    p = log_probabilities.exp()
    rest, student_rest = (1 - p.sum(-1)).clamp_min(LEAST), (1 - student.exp().sum(-1)).clamp_min(LEAST)
    known = (p * (log_probabilities - student)).sum(-1)
    return (known + rest * (rest.log() - student_rest.log())).mean()
