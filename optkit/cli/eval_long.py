"""The ``--long`` part of ``optkit eval``: documents, scores and tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from optkit.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from optkit.evaluation.long.score import LongReport, LongScore
    from optkit.evaluation.quality import Estimate

WINDOWS = 2  # of plain text, for the divergence by position
WHERE = "--lengths"


def parse_lengths(text: str | None, most: int) -> list[int]:
    """Lengths of ``--lengths``, or the default ones within a context of ``most`` tokens.

    Raises:
        UserError: no list of numbers, or a length beyond the context.
    """
    from optkit.evaluation.long.tasks import LENGTHS

    if text is None:
        return [length for length in LENGTHS if length <= most] or [most]
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 8 for part in parts):
        raise UserError(f"needs numbers of tokens such as 1024,8192, got {text!r:.60}", where=WHERE)
    lengths = sorted({int(part) for part in parts})
    if lengths[-1] > most:
        raise UserError(
            f"{lengths[-1]} tokens are more than the context of {most}",
            where=WHERE,
            fix=f"give lengths up to {most}",
        )
    return lengths


def long_report(
    candidate: Any,
    reference: Any | None,
    tokenizer: Any,
    lengths: Sequence[int],
    count: int,
    progress: Callable[[str], None],
) -> LongReport:
    """Scores of ``candidate``, an ``AnswerSource``, against ``reference``; KL by position where both have rows."""
    from dataclasses import replace

    from optkit.evaluation.long.positions import kl_by_position
    from optkit.evaluation.long.score import score_long
    from optkit.evaluation.long.sources import RowSource
    from optkit.evaluation.long.tasks import documents
    from optkit.evaluation.quality import evaluation_windows

    progress("making long documents")
    made = documents(tokenizer, lengths, count=count)
    report = score_long(candidate, made, reference, progress=progress)
    if not (isinstance(candidate, RowSource) and isinstance(reference, RowSource)):
        return report
    progress(f"scoring {WINDOWS} windows of {lengths[-1]} tokens")
    windows = evaluation_windows(tokenizer, WINDOWS * lengths[-1], lengths[-1], or_fewer=True)
    return replace(report, positions=kl_by_position(candidate, reference, windows))


def tables(report: LongReport) -> list[Table]:
    """Tables by task, by depth, and by position."""
    from rich.table import Table

    compared = any(task.score.loss is not None for task in report.tasks)
    more = ("loss", "KL", "agreement") if compared else ()
    by_task = Table("task", "tokens", "answers", "log p", "gain", "exact", *more, box=None, pad_edge=False)
    for task in report.tasks:
        name = task.task if task.signal else f"{task.task} (no signal)"
        by_task.add_row(name, f"{task.length:,}", *_cells(task.score))
    by_depth = Table("depth", "answers", "log p", "gain", "exact", *more, box=None, pad_edge=False)
    for name, score in report.by_depth.items():
        by_depth.add_row(name, *_cells(score))
    found = [by_task, by_depth] if report.by_depth else [by_task]
    if report.positions:
        by_position = Table("positions of plain text", "KL", "agreement", box=None, pad_edge=False)
        for s in report.positions:
            by_position.add_row(f"{s.first} to {s.last}", _number(s.kl), _number(s.top1_agreement, 100))
        found.append(by_position)
    return found


def summary(report: LongReport) -> str:
    """The loss over all tasks with a signal, in a sentence."""
    on = f"{report.documents} documents, {report.tokens:,} tokens"
    if not any(task.signal for task in report.tasks):
        return f"{on}: the model takes no answer from a document, so there is nothing to lose"
    if report.loss is None:
        return f"{on}; log p and gain in nats an answer token, exact and agreement in %"
    return f"loss on long documents: {_number(report.loss)} nats an answer token ({on})"


def _cells(score: LongScore) -> list[str]:
    cells = [str(score.questions), _number(score.logprob), _number(score.gain), f"{100 * score.exact:.0f}"]
    if score.loss is not None:
        cells += [_number(score.loss), _number(score.kl), _number(score.agreement, 100)]
    return cells


def _number(estimate: Estimate | None, scale: float = 1.0) -> str:
    return "-" if estimate is None else f"{scale * estimate.value:.3g} ± {scale * estimate.stderr:.2g}"
