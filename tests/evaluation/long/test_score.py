"""Scores of long documents, by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch

from optkit.evaluation.long.document import Document, Question
from optkit.evaluation.long.score import KeptAnswers, score_long
from optkit.evaluation.long.sources import Answered

DOCUMENTS = [
    Document("easy", 100, (1, 2, 3), (Question((4,), (5, 6), 0.1), Question((7,), (8,), 0.9))),
    Document("easy", 100, (3, 2, 1), (Question((4,), (5,), 0.3),)),
    Document("hard", 100, (1, 2, 4), (Question((4,), (5,)),)),
]


class Fixed:
    """Log probabilities of each document's answers; ``blind`` of every token without the document."""

    def __init__(self, *answers: Sequence[Sequence[float]], blind: float = -9.0, rows: bool = False) -> None:
        self.known = dict(zip(DOCUMENTS, answers, strict=True))
        self.blind, self.rows, self.asked = blind, rows, 0

    def answers(self, document: Document) -> list[Answered]:
        self.asked += 1
        values = self.known.get(document) or [[self.blind] * len(q.answer) for q in document.questions]
        return [self.answered(torch.tensor(one, dtype=torch.float64)) for one in values]

    def answered(self, logprobs: torch.Tensor) -> Answered:
        p = logprobs.exp()
        rows = torch.stack([p, 1 - p], -1).log() if self.rows else None
        return Answered(logprobs, p > 0.5, rows)


FULL = Fixed([[-0.1, -0.3], [-0.4]], [[-1.0]], [[-8.5]])
WORSE = Fixed([[-1.1, -2.3], [-0.4]], [[-3.0]], [[-1.0]])


def test_a_model_loses_nothing_against_itself() -> None:
    report = score_long(FULL, DOCUMENTS, FULL)
    assert report.loss is not None and (report.loss.value, report.loss.stderr) == (0.0, 0.0)
    assert report.agreement is not None and report.agreement.value == 1


def test_the_loss_is_the_mean_over_answers_of_tasks_that_the_reference_can_answer() -> None:
    report = score_long(WORSE, DOCUMENTS, FULL)
    easy, hard = report.tasks
    assert (easy.signal, hard.signal) == (True, False)  # 0.5 nats of gain are no signal
    assert hard.score.gain.value == pytest.approx(0.5)
    assert easy.score.gain.value == pytest.approx((8.8 + 8.6 + 8.0) / 3)
    assert report.loss is not None and report.loss.value == pytest.approx((1.5 + 0.0 + 2.0) / 3)
    assert report.loss.stderr == pytest.approx(torch.tensor([0.75, 2.0]).std().item() / 2**0.5)
    assert easy.score.exact == pytest.approx(1 / 3) and easy.score.reference_exact == pytest.approx(2 / 3)
    assert report.by_depth["0 to 25 %"].loss.value == pytest.approx(1.5)  # type: ignore[union-attr]
    assert report.by_depth["25 to 50 %"].questions == report.by_depth["75 to 100 %"].questions == 1
    assert report.by_length[100].questions == 3


def test_rows_give_a_divergence() -> None:
    sides = [Fixed(*source.known.values(), rows=True) for source in (WORSE, FULL)]
    report = score_long(sides[0], DOCUMENTS[:2], sides[1])
    p, q = torch.tensor([-0.1, -0.3]).exp(), torch.tensor([-1.1, -2.3]).exp()
    first = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean()
    p, q = torch.tensor(-1.0).exp(), torch.tensor(-3.0).exp()
    third = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    assert report.kl is not None and report.kl.value == pytest.approx(float(first + third) / 3, rel=1e-5)


def test_without_a_reference_the_gain_is_the_models_own() -> None:
    report = score_long(FULL, DOCUMENTS)
    assert report.loss is report.kl is None
    assert report.tasks[0].signal and report.tasks[0].score.loss is None
    json.dumps(report.to_dict())


def test_no_task_with_a_signal_means_no_loss() -> None:
    report = score_long(WORSE, DOCUMENTS[2:], Fixed(*FULL.known.values(), blind=-8.0))
    assert report.loss is None and not report.by_length and report.tokens == 3


def test_kept_answers_are_computed_once_by_a_source_that_is_not_kept() -> None:
    made: list[Fixed] = []

    def make() -> Fixed:
        made.append(Fixed(*FULL.known.values(), rows=True))
        return made[-1]

    kept = KeptAnswers(make)
    for _ in range(2):
        report = score_long(WORSE, DOCUMENTS, kept)
        assert report.loss is not None and report.loss.value == pytest.approx(3.5 / 3)
    assert len(made) == 1 and made[0].asked == 2 * len(DOCUMENTS)
