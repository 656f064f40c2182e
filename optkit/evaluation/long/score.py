"""Scores of long documents: the log probability of the true answer, and the loss against a reference.

A small model answers few tasks word by word, so a right answer counts less than the log probability. Each question is
asked with the document and without (*blind*). The *gain* by the document, in nats a token, is the part of an answer
taken from the context. A task with a gain of the reference below ``LEAST_GAIN`` carries no signal for the model and is
left out of the loss.

The *loss* is the log probability by the reference less the log probability by the candidate, the mean over answer
tokens, paired by question. The loss is 0 for equal models, and about the gain for a model without the evidence.
Standard errors are over documents, since the questions of a document share a context.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from optkit.evaluation.long.document import Document
from optkit.evaluation.long.sources import Answered, AnswerSource
from optkit.evaluation.quality import Estimate, PositionScore, compare_rows, mean_estimate

LEAST_GAIN = (
    1.0  # nats an answer token, of the reference: the context makes an answer's token e times as likely
)
DEPTHS = 4  # parts of a document

Key = tuple[str, int]
Progress = Callable[[str], None]


def no_progress(text: str) -> None:
    """Progress that is not shown."""


@dataclass(frozen=True)
class LongScore:
    """Scores of some answers. Log probabilities, losses and divergences are in nats an answer token.

    Attributes:
        questions: number of answers.
        logprob: of the true answer.
        exact: share of answers with the most likely token at each place.
        gain: log probability with the document, less without, by the reference, or by the model without a reference.
        loss, kl, agreement, reference_exact: against the reference; None without one. ``kl`` is None for a server.
    """

    questions: int
    logprob: Estimate
    exact: float
    gain: Estimate
    loss: Estimate | None = None
    kl: Estimate | None = None
    agreement: Estimate | None = None
    reference_exact: float | None = None


@dataclass(frozen=True)
class TaskScore:
    """A task at a length; ``signal`` is True for a task that counts in the loss."""

    task: str
    length: int
    signal: bool
    score: LongScore


@dataclass(frozen=True)
class LongReport:
    """Long documents answered by a model, against a reference if given.

    Attributes:
        documents, tokens: the number of documents, and the tokens of all contexts.
        loss: over the tasks with a signal; None without a reference, or where no task has a signal.
        kl, agreement: over the same answers.
        tasks: by task and length.
        by_length, by_depth: the same answers by length, and by the depth of the evidence in quarters.
        positions: KL divergence by position of a plain text.
    """

    documents: int
    tokens: int
    loss: Estimate | None
    kl: Estimate | None
    agreement: Estimate | None
    tasks: tuple[TaskScore, ...]
    by_length: dict[int, LongScore]
    by_depth: dict[str, LongScore]
    positions: tuple[PositionScore, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON data; lengths and depths are keys of text."""
        return asdict(self) | {
            "by_length": {str(length): asdict(score) for length, score in self.by_length.items()},
            "by_depth": {name: asdict(score) for name, score in self.by_depth.items()},
            "tasks": [asdict(task) for task in self.tasks],
            "positions": [asdict(score) for score in self.positions],
        }


@dataclass(frozen=True)
class _Row:
    """Scores of an answer; ``document`` is the number of the document."""

    document: int
    key: Key
    depth: float | None
    logprobs: Tensor
    gain: Tensor
    exact: bool
    loss: Tensor | None = None
    kl: Tensor | None = None
    same: Tensor | None = None
    reference_exact: bool | None = None


def score_long(
    candidate: AnswerSource,
    documents: Sequence[Document],
    reference: AnswerSource | None = None,
    *,
    progress: Progress = no_progress,
) -> LongReport:
    """``candidate`` on ``documents``, against ``reference``.

    Both sides run document by document; ``KeptAnswers`` answer all documents first.
    """
    rows: list[_Row] = []
    if isinstance(reference, KeptAnswers):
        reference.fill(documents, progress)
    for number, document in enumerate(documents):
        progress(counted(document, number, len(documents)))
        rows += _scored(number, document, candidate, reference)
    return _report(rows, documents)


class KeptAnswers:
    """Answers of a source, computed once for each document, with and without the document: some MB each.

    Args:
        make: makes the source; called for each request with documents not kept yet. So the source's memory is free
            between two requests.
    """

    def __init__(self, make: Callable[[], AnswerSource]) -> None:
        self.make = make
        self.kept: dict[Document, list[Answered]] = {}

    def answers(self, document: Document) -> list[Answered]:
        self.fill([document], no_progress)
        return self.kept[document]

    def fill(self, documents: Sequence[Document], progress: Progress) -> None:
        """Compute what is missing."""
        missing = [document for document in documents if document not in self.kept]
        source = self.make() if missing else None
        for number, document in enumerate(missing):
            assert source is not None
            progress(f"reference, {counted(document, number, len(missing))}")
            guess = blind(document)
            self.kept[document] = source.answers(document)
            self.kept[guess] = [replace(answered, rows=None) for answered in source.answers(guess)]


def counted(document: Document, number: int, count: int) -> str:
    """``needle, 1024 tokens: document 1 of 28``"""
    return f"{document.task}, {document.length} tokens: document {number + 1} of {count}"


def blind(document: Document) -> Document:
    """The questions of a document without the document: what a model answers from its weights."""
    return replace(document, context=document.context[:1])


def _scored(
    number: int, document: Document, candidate: AnswerSource, reference: AnswerSource | None
) -> Iterable[_Row]:
    given = candidate.answers(document)
    right = given if reference is None else reference.answers(document)
    without = (reference or candidate).answers(blind(document))
    for question, mine, theirs, guess in zip(document.questions, given, right, without, strict=True):
        row = _Row(
            number,
            (document.task, document.length),
            question.depth,
            mine.logprobs,
            theirs.logprobs - guess.logprobs,
            bool(mine.right.all()),
        )
        if reference is None:
            yield row
            continue
        kl = same = None
        if mine.rows is not None and theirs.rows is not None:
            kl, same = compare_rows(theirs.rows, mine.rows)
        yield replace(
            row,
            loss=theirs.logprobs - mine.logprobs,
            kl=kl,
            same=(mine.right == theirs.right).double() if same is None else same,
            reference_exact=bool(theirs.right.all()),
        )


def _report(rows: Sequence[_Row], documents: Sequence[Document]) -> LongReport:
    by_key: dict[Key, list[_Row]] = defaultdict(list)
    for row in rows:
        by_key[row.key].append(row)
    tasks = []
    for (task, length), found in by_key.items():
        score = _score(found)
        tasks.append(TaskScore(task, length, score.gain.value >= LEAST_GAIN, score))
    counted = {(task.task, task.length) for task in tasks if task.signal}
    chosen = [row for row in rows if row.key in counted]
    whole = _score(chosen) if chosen else None
    lengths = sorted({row.key[1] for row in chosen})
    depths: dict[str, list[_Row]] = {
        f"{100 * i // DEPTHS} to {100 * (i + 1) // DEPTHS} %": [
            row for row in chosen if row.depth is not None and int(min(row.depth, 0.999) * DEPTHS) == i
        ]
        for i in range(DEPTHS)
    }
    return LongReport(
        documents=len(documents),
        tokens=sum(len(document.context) for document in documents),
        loss=whole and whole.loss,
        kl=whole and whole.kl,
        agreement=whole and whole.agreement,
        tasks=tuple(tasks),
        by_length={n: _score([row for row in chosen if row.key[1] == n]) for n in lengths},
        by_depth={name: _score(found) for name, found in depths.items() if found},
    )


def _score(rows: Sequence[_Row]) -> LongScore:
    compared = rows[0].loss is not None
    return LongScore(
        questions=len(rows),
        logprob=_estimate(rows, "logprobs"),
        exact=sum(row.exact for row in rows) / len(rows),
        gain=_estimate(rows, "gain"),
        loss=_estimate(rows, "loss") if compared else None,
        kl=_estimate(rows, "kl") if rows[0].kl is not None else None,
        agreement=_estimate(rows, "same") if compared else None,
        reference_exact=sum(bool(row.reference_exact) for row in rows) / len(rows) if compared else None,
    )


def _estimate(rows: Sequence[_Row], name: str) -> Estimate:
    """The mean over answers of the mean over tokens; standard error over documents."""
    documents: dict[int, list[Tensor]] = defaultdict(list)
    for row in rows:
        documents[row.document].append(getattr(row, name).double().mean())
    return mean_estimate([torch.stack(values) for values in documents.values()])
