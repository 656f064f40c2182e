"""The section on quality: divergence by position, and greedy continuations until they differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import exp

from optkit.evaluation.saved import EstimateEntry, Evaluation, LongEntry, Quality
from optkit.pages.charts import Series, xy_chart
from optkit.pages.html import Markup, element, wide_table
from optkit.pages.numbers import NONE, number, share
from optkit.pages.page import Section
from optkit.pages.svg import grid

EVAL_COMMAND = "optkit eval artifact/ --against MODEL --json > eval.json, then optkit report --eval eval.json"


def quality_section(evaluations: Sequence[Evaluation]) -> Section:
    """Quality of each evaluation."""
    body = [part for evaluation in evaluations for part in quality_body(evaluation)]
    return Section("quality", "Quality", body, f"quality: {EVAL_COMMAND}")


def greedy_missing(evaluations: Sequence[Evaluation]) -> Section:
    """A section without content, for its line, where no evaluation compared greedy continuations."""
    found = any(quality.greedy for evaluation in evaluations for quality in evaluation.variants.values())
    return Section(
        "greedy", "", (), "" if found or not evaluations else f"greedy continuations: {EVAL_COMMAND}"
    )


def quality_body(evaluation: Evaluation) -> list[Markup]:
    table = wide_table(
        ("quality", *(name or "value" for name in evaluation.variants)),
        quality_table(evaluation),
        f"quality, {evaluation.title}",
    )
    charts = grid([position_chart(evaluation), agreement_chart(evaluation), greedy_chart(evaluation)])
    measured = next((quality.long for quality in evaluation.variants.values() if quality.long), None)
    long = long_parts(measured) if measured else ()  # of all variants together
    return [part for part in (element("h3", evaluation.title), table, charts, *long) if part]


def quality_table(evaluation: Evaluation) -> Iterator[tuple[str, ...]]:
    """Rows of numbers, a column for each variant; rows without a number are left out."""
    columns = [list(quality_cells(quality)) for quality in evaluation.variants.values()]
    for rows in zip(*columns, strict=True):
        if any(cell != NONE for _, cell in rows):
            yield rows[0][0], *(cell for _, cell in rows)


def quality_cells(quality: Quality) -> Iterator[tuple[str, str]]:
    """(name, text) of all numbers, in a fixed order."""
    ratio = quality.ln_ppl_ratio
    yield "mean KL divergence, nats", estimate_text(quality.kl_mean)
    yield "mean KL divergence, nats, at least", estimate_text(quality.kl_lower_bound)
    tail = (quality.kl_median, quality.kl_p99, quality.kl_max)
    yield "KL, median / p99 / largest", " / ".join(map(number, tail)) if any(tail) else NONE
    yield "top-1 agreement", estimate_text(quality.top1_agreement, percent=True)
    yield "perplexity", estimate_text(quality.ppl)
    yield "perplexity of the reference", estimate_text(quality.reference_ppl)
    value = ratio.value if ratio else None
    yield (
        "perplexity, over the reference's",
        NONE if value is None or abs(value) > 700 else f"{exp(value):.4f}",
    )
    yield "scored positions", positions_text(quality)
    yield "equal greedy tokens", greedy_text(quality)


def positions_text(quality: Quality) -> str:
    """``8,176 in 16 windows of 40``"""
    if not quality.windows:
        return NONE
    of = f" of {quality.planned_windows:,}" if quality.planned_windows else ""
    return f"{quality.tokens:,} in {quality.windows:,} windows{of}"


def long_parts(long: LongEntry) -> Iterator[Markup]:
    """The scores of long documents, by task and length; then the divergence by position of plain text."""
    rows = [
        (
            task.task if task.signal else f"{task.task} (no signal)",
            f"{task.length:,}",
            estimate_text(task.score.logprob),
            estimate_text(task.score.gain),
            share(task.score.exact),
            estimate_text(task.score.loss),
            estimate_text(task.score.agreement, percent=True),
        )
        for task in long.tasks
    ]
    total = (
        "all with a signal",
        "",
        "",
        "",
        "",
        estimate_text(long.loss),
        estimate_text(long.agreement, percent=True),
    )
    header = (
        "task",
        "tokens",
        "log p of the answer, nats a token",
        "gain by the document",
        "exact",
        "loss",
        "agreement",
    )
    yield wide_table(
        header, [*rows, total], f"long documents, {long.documents:,} of {long.tokens:,} tokens in all"
    )
    points = [(middle(s.first, s.last), s.kl.value) for s in long.positions if s.kl.value is not None]
    if points:
        yield xy_chart(
            "KL divergence by position, long text",
            "position in the window",
            "KL, nats",
            [Series("mean", points, 0)],
            log_x=True,
        )


def estimate_text(entry: EstimateEntry | None, *, percent: bool = False) -> str:
    """``0.00412 ± 0.0003``"""
    if entry is None or entry.value is None:
        return NONE
    write = share if percent else number
    return write(entry.value) + (f" ± {write(entry.stderr)}" if entry.stderr else "")


def greedy_text(quality: Quality) -> str:
    """``median 41 of 64, 5 of 16 without a difference``"""
    if quality.greedy is None:
        return NONE
    lengths, tokens = sorted(quality.greedy.lengths), quality.greedy.tokens
    middle = (lengths[(len(lengths) - 1) // 2] + lengths[len(lengths) // 2]) / 2
    unchanged = sum(length >= tokens for length in lengths)
    return f"median {middle:g} of {tokens}, {unchanged} of {len(lengths)} without a difference"


# -- charts ---------------------------------------------------------------------------------------------------


def position_chart(evaluation: Evaluation) -> Markup:
    """Mean KL by position; a point stands in the middle of its range."""
    series = [
        Series(f"{name or 'mean'}", points, i)
        for i, (name, quality) in enumerate(evaluation.variants.items())
        if (
            points := [
                (middle(s.first, s.last), s.kl.value) for s in quality.by_position if s.kl.value is not None
            ]
        )
    ]
    note = "A rise along the window would come from the KV cache or from attention."
    return xy_chart(
        "KL divergence by position", "position in the window", "KL, nats", series, note=note, log_x=True
    )


def agreement_chart(evaluation: Evaluation) -> Markup:
    """Top-1 agreement by position, in percent."""
    series = [
        Series(f"{name or 'agreement'}", points, i)
        for i, (name, quality) in enumerate(evaluation.variants.items())
        if (
            points := [
                (middle(s.first, s.last), 100 * s.top1_agreement.value)
                for s in quality.by_position
                if s.top1_agreement.value is not None
            ]
        )
    ]
    return xy_chart(
        "Top-1 agreement by position",
        "position in the window",
        "agreement, %",
        series,
        log_x=True,
        zero_y=False,
    )


def middle(first: int, last: int) -> float:
    """The middle of positions counted from 1, on a logarithmic axis."""
    return float(((first + 1) * (last + 1)) ** 0.5)


def greedy_chart(evaluation: Evaluation) -> Markup:
    """The share of continuations that are still equal after each number of tokens."""
    series = []
    for i, (name, quality) in enumerate(evaluation.variants.items()):
        if quality.greedy is not None:
            series.append(
                Series(
                    name or "equal", survival(quality.greedy.lengths, quality.greedy.tokens), i, dots=False
                )
            )
    note = "The share of prompts whose continuation is still that of the reference."
    return xy_chart(
        "Greedy continuations",
        "generated tokens",
        "still equal, %",
        series,
        note=note,
        log_x=False,
        log_y=False,
    )


def survival(lengths: Sequence[int], tokens: int) -> list[tuple[float, float]]:
    """(tokens, % of continuations equal so far), as steps."""
    points, share_before = [(0.0, 100.0)], 100.0
    for length in sorted(set(lengths)):
        if length >= tokens:
            break
        now = 100 * sum(other > length for other in lengths) / len(lengths)
        points += [(float(length), share_before), (float(length), now)]
        share_before = now
    return [*points, (float(tokens), share_before)]
