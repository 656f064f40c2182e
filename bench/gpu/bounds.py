"""The bounds for an H200, as a table over the measured rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Stages = Mapping[str, Mapping[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class Bound:
    """A limit on ``value`` of row ``row`` in ``stage``, divided by the value of ``over`` if given."""

    name: str
    stage: str
    row: str
    value: str
    limit: float
    at_least: bool = False
    over: tuple[str, str] | None = None

    def verdict(self, stages: Stages) -> dict[str, Any]:
        measured = stages.get(self.stage, {}).get(self.row, {}).get(self.value)
        if measured is not None and self.over is not None:
            base = stages.get(self.over[0], {}).get(self.over[1], {}).get(self.value)
            measured = None if base is None else measured / base
        ok = None if measured is None else measured >= self.limit if self.at_least else measured <= self.limit
        return {"name": self.name, "limit": self.limit, "measured": measured, "ok": ok}


SEVEN, THIRTEEN, HF = "llama-2-7b", "llama-2-13b", ("transformers", "llama-2-7b")
LIMITS_7B = {
    "bf16": {"ttft_512_ms": 10.5, "ttft_2048_ms": 41.0, "tpot_ms": 4.6},
    "fp8": {"ttft_512_ms": 7.6, "ttft_2048_ms": 27.0, "tpot_ms": 3.4},
    "int4": {"tpot_ms": 2.6},
}
BOUNDS = (
    *(
        Bound(f"7B {scheme} {value}", "models", f"{SEVEN} {scheme}", value, limit)
        for scheme, limits in LIMITS_7B.items()
        for value, limit in limits.items()
    ),
    Bound("13B bf16 ttft_512_ms", "large", f"{THIRTEEN} bf16", "ttft_512_ms", 20.0),
    Bound("13B fp8 ttft_512_ms", "large", f"{THIRTEEN} fp8", "ttft_512_ms", 15.0),
    Bound(
        "served, output tokens a second",
        "serve",
        f"{SEVEN} throughput",
        "output_tokens_per_s",
        1e4,
        at_least=True,
    ),
    Bound("TTFT 512 over transformers", "models", f"{SEVEN} bf16", "wall_ttft_512_ms", 0.6, over=HF),
    Bound("TPOT over transformers", "models", f"{SEVEN} bf16", "wall_tpot_ms", 0.6, over=HF),
)


def verdicts(stages: Stages) -> list[dict[str, Any]]:
    """Every bound beside the measured value: the table above, and the kernels' own bounds."""
    kernels = [
        {"name": name, "limit": row["most"], "measured": row["ratio"], "ok": row["ok"]}
        for name, row in stages.get("kernels", {}).items()
        if "most" in row
    ]
    checks = stages.get("check", {})
    wrong = [name for name, row in checks.items() if not row.get("ok")]
    correct = {"name": "kernels that are wrong", "limit": 0, "measured": len(wrong) if checks else None}
    correct["ok"] = not wrong if checks else None
    return [correct, *(bound.verdict(stages) for bound in BOUNDS), *kernels]


def table(rows: list[dict[str, Any]]) -> str:
    """A line per bound, for people."""
    words = {True: "pass", False: "FAIL", None: "open"}
    return "\n".join(
        f"{words[row['ok']]:5} {'-' if row['measured'] is None else format(row['measured'], '.4g'):>9}"
        f"  bound {row['limit']:<8g} {row['name']}"
        for row in rows
    )
