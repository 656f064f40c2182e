"""``best_of``: more answers are generated than returned; the likeliest by mean log probability of a token are kept."""

from __future__ import annotations

from collections.abc import Sequence

from optkit.serve.openai.generation import Delta


def best(answers: Sequence[Delta], generated: int, kept: int) -> list[Delta]:
    """The ``kept`` likeliest of each ``generated`` neighbours, likeliest first, with new indices.

    Args:
        answers: of all prompts, with logprobs.
    """
    found: list[Delta] = []
    for first in range(0, len(answers), generated):
        ranked = sorted(answers[first : first + generated], key=mean_logprob, reverse=True)
        found += [answer._replace(choice=len(found) + i) for i, answer in enumerate(ranked[:kept])]
    return found


def mean_logprob(answer: Delta) -> float:
    """The mean log probability of the answer's tokens; -infinity for an answer without."""
    values = [entry.logprob for entry in answer.logprobs if entry.logprob is not None]
    return sum(values) / len(values) if values else float("-inf")
