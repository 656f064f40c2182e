"""The reason for a decision, in words: the decision, and the prediction beside the measurement.

"I quantized it and it is not faster" has an answer before any measurement: weights of fewer bits speed up steps bound
by memory, int8 arithmetic steps bound by compute. So each step is shown with the bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from optkit.pipeline.records import PassRecord

SHORT = 0.8  # of the predicted gain: a measurement below is worth a word


def explain(record: PassRecord, target: Mapping[str, Any]) -> str:
    """``kept: KL 0.003, ...; decode@513 is memory bound: predicted 1.90x, measured 1.80x; ...``"""
    return "; ".join([f"{record.decision}: {record.reason}", *speed_sentences(record, target)])


def speed_sentences(record: PassRecord, target: Mapping[str, Any]) -> Iterator[str]:
    """``decode@513 is memory bound: predicted 1.90x, measured 1.80x`` for each measured step."""
    for label in record.measured:
        bound = bound_by(record, label, target)
        subject = f"{label} is {bound} bound" if bound else label
        if label not in record.predicted:
            yield f"{subject}: measured {record.speedup(label):.2f}x"
            continue
        predicted, measured = record.predicted_speedup(label), record.speedup(label)
        less = ", less than predicted" if measured < SHORT * predicted else ""
        yield f"{subject}: predicted {predicted:.2f}x, measured {measured:.2f}x{less}"


def objective_sentence(record: PassRecord) -> str:
    """``objective: ttft 0.52x of before, 95 % interval 0.50 to 0.54``"""
    change = record.objective
    verdict = ": worse" if change["worse"] else ""
    interval = f"95 % interval {change['low']:.2f} to {change['high']:.2f}"
    return f"objective: {change['name']} {change['ratio']:.2f}x of before, {interval}{verdict}"


def bound_by(record: PassRecord, label: str, target: Mapping[str, Any]) -> str | None:
    """``memory`` when reading the weights once is most of the predicted time after the pass, else ``compute``."""
    bandwidth, predicted = target.get("memory_bandwidth"), record.predicted.get(label)
    if not bandwidth or not predicted or not record.weight_bytes:
        return None
    return "memory" if record.weight_bytes[1] / bandwidth > predicted[1] / 2 else "compute"
