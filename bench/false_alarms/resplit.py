"""Stored A/A rounds, split at random: the share of splits whose interval excludes "no change".

A round holds the latencies of two sides that serve the same artifact, by prompt. A split takes some of the rounds and
calls either side the candidate, by a fair coin for each round. Nothing differs but the names, so each alarm is false.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from optkit.bench.comparison import by_prompt
from optkit.bench.result import BenchResult
from optkit.bench.statistics import log_ratios, mean_interval

METRICS = ("ttft", "tpot", "e2e")
STORED = Path(__file__).resolve().parents[1] / "results" / "aa-rounds.json"
SPLITS, ROUNDS = 1000, 10

Round = Mapping[str, Mapping[str, Sequence[float]]]  # {side: {metric: milliseconds by prompt}}


def stored(file: Path = STORED) -> list[Round]:
    """The rounds of a file of ``collected``."""
    return list(json.loads(file.read_text())["rounds"])


def collected(result: BenchResult) -> list[Round]:
    """The latencies of each round and side, in microseconds' precision.

    Raises:
        ValueError: a request failed.
    """
    if result.problems() and any(not r.ok for side in result.sides for r in result.records(side)):
        raise ValueError(f"requests failed: {result.problems()[0]}")
    rounds: dict[int, dict[str, dict[str, list[float]]]] = {}
    for turn in result.turns:
        rows = {metric: by_prompt(turn.records, metric) for metric in METRICS}
        rounds.setdefault(turn.round, {})[turn.side] = {
            metric: [round(row[i], 3) for i in sorted(row)] for metric, row in rows.items()
        }
    return [dict(rounds[number]) for number in sorted(rounds)]


def log_ratio(one: Round, metric: str) -> float:
    """The round's number: the median over prompts of log(first side / second side)."""
    a, b = (dict(enumerate(side[metric])) for side in one.values())
    return float(np.median(log_ratios(a, b)))


def alarms(
    rounds: Sequence[Round], metric: str, splits: int = SPLITS, size: int = ROUNDS, seed: int = 0
) -> float:
    """The share of ``splits`` random splits of ``size`` rounds whose 95 % interval excludes no change."""
    ratios = np.array([log_ratio(one, metric) for one in rounds])
    generator = np.random.default_rng(seed)
    count = 0
    for _ in range(splits):
        chosen = generator.choice(ratios, size, replace=False) * generator.choice((-1, 1), size)
        found = mean_interval(chosen.tolist())
        count += found is None or found.excludes(0.0)
    return count / splits


def report(rounds: Sequence[Round], splits: int = SPLITS, size: int = ROUNDS) -> dict[str, Any]:
    """{"alarms of METRIC, %": share} for each metric."""
    return {f"alarms of {metric}, %": 100 * alarms(rounds, metric, splits, size) for metric in METRICS}
