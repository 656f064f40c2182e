"""The reason for a decision, in words: the decision, and the prediction beside the measurement.

"I quantized it and it is not faster" has an answer before any measurement: weights of fewer bits speed up steps bound
by memory, int8 arithmetic steps bound by compute. So each step is shown with the bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from optkit.pipeline.records import PassRecord

FAR = (
    0.2  # of the measured speedup: a prediction further off is a miss of the cost model, which users are told
)

SPREAD = 1.5  # third over first quartile of the times of a step: above, the machine was busy with other work


def explain(record: PassRecord, target: Mapping[str, Any]) -> str:
    """``kept: KL 0.003, ...; decode@513 is memory bound: predicted 1.90x, measured 1.80x; ...``"""
    return "; ".join([f"{record.decision}: {record.reason}", *speed_sentences(record, target)])


def speed_sentences(record: PassRecord, target: Mapping[str, Any]) -> Iterator[str]:
    """``decode@513 is memory bound: predicted 1.90x, measured 1.80x`` for each measured step."""
    for label in record.measured:
        bound = bound_by(record, label, target)
        subject = f"{label} is {bound} bound" if bound else label
        if label not in record.predicted:
            yield f"{subject}: no prediction, measured {record.speedup(label):.2f}x"
            continue
        predicted, measured = record.predicted_speedup(label), record.speedup(label)
        less = ", less than predicted" if measured < predicted and is_missed(record, label) else ""
        yield f"{subject}: predicted {predicted:.2f}x, measured {measured:.2f}x{less}"


def disturbed(records: Sequence[PassRecord]) -> list[str]:
    """``int8, prefill 512: 1.30 to 3.03 s`` for each step whose times on a side differ too much between rounds."""
    return [
        f"{record.name}, {label}: {times['q1']:.3g} to {times['q3']:.3g} s"
        for record in records
        for label, sides in record.measured.items()
        for times in sides
        if times["q3"] > SPREAD * times["q1"]
    ]


def disturbed_sentence(records: Sequence[PassRecord]) -> str:
    """A line about the measurements of ``records`` beside other work; empty without any."""
    found = disturbed(records)
    if not found:
        return ""
    advice = "optkit bench measures again"
    return f"other work disturbed {len(found)} measurements, quartiles of the rounds: {'; '.join(found)}; {advice}"


def is_missed(record: PassRecord, label: str) -> bool:
    """True where the predicted speedup at ``label`` is more than ``FAR`` off the measured one."""
    measured = record.speedup(label)
    return abs(record.predicted_speedup(label) - measured) > FAR * measured


def misses(records: Sequence[PassRecord]) -> list[str]:
    """``int8, prefill 512: predicted 3.39x, measured 2.12x`` for each prediction of ``records`` that is far off."""
    return [
        f"{record.name}, {label}: predicted {record.predicted_speedup(label):.2f}x, "
        f"measured {record.speedup(label):.2f}x"
        for record in records
        for label in record.measured
        if label in record.predicted and is_missed(record, label)
    ]


def misses_sentence(records: Sequence[PassRecord]) -> str:
    """A line about the predictions of ``records``: those more than 20 % off, and their number; empty without any."""
    compared = [label for r in records for label in r.measured if label in r.predicted]
    if not compared:
        return ""
    found = misses(records)
    if not found:
        return f"all {len(compared)} predictions are within {FAR:.0%} of the measured speedups"
    listed = "; ".join(found)
    return f"{len(found)} of {len(compared)} predictions are more than {FAR:.0%} off: {listed}"


def objective_sentence(record: PassRecord) -> str:
    """``objective: ttft 0.52x of before, 95 % interval 0.50 to 0.54``; a loss is called one."""
    change = record.objective
    interval = f"95 % interval {change['low']:.2f} to {change['high']:.2f}"
    subject = (
        f"the objective got worse: {change['name']}" if change["worse"] else f"objective: {change['name']}"
    )
    return f"{subject} {change['ratio']:.2f}x of before, {interval}"


def bound_by(record: PassRecord, label: str, target: Mapping[str, Any]) -> str | None:
    """``memory`` when reading the weights once is most of the predicted time after the pass, else ``compute``."""
    bandwidth, predicted = target.get("memory_bandwidth"), record.predicted.get(label)
    if not bandwidth or not predicted or not record.weight_bytes:
        return None
    return "memory" if record.weight_bytes[1] / bandwidth > predicted[1] / 2 else "compute"
