"""The texts of a report, for a terminal and for the page."""

from __future__ import annotations

from optkit.profiling.report import OpRow, PhaseReport, Report

COLUMNS = ("where", "op", "layers", "time", "of step", "roof", "of roof", "lost", "bound")


def machine(report: Report) -> str:
    """The machine and the roofs in words."""
    target = report.target
    rates = f"{target.fp32_flops / 1e9:.0f} GFLOP/s float32, {target.int8_ops / 1e9:.0f} Gop/s int8"
    memory = f"{target.memory_bandwidth / 1e9:.1f} GB/s"
    return f"{target.name}, {report.threads} threads; roofs ({target.source}): {memory}, {rates}"


def summary(phase: PhaseReport) -> str:
    """The times of a phase in a sentence."""
    low, high = min(phase.all_seconds) * 1e3, max(phase.all_seconds) * 1e3
    steps = f"median of {len(phase.all_seconds)} steps of {low:.2f} to {high:.2f} ms"
    share = phase.roof / phase.seconds
    roof = f"roof {phase.roof * 1e3:.2f} ms, {share:.0%} of the step"
    return f"{phase.seconds * 1e3:.2f} ms ({steps}); {roof}; ops and named parts {phase.accounted:.1%}"


def cells(row: OpRow, phase: PhaseReport) -> tuple[str, ...]:
    """The texts of a row, in the order of ``COLUMNS``; empty where a part has no roof."""
    seconds, share = f"{row.seconds * 1e3:.3f} ms", f"{row.seconds / phase.seconds:.1%}"
    roof = (f"{row.roof * 1e3:.3f} ms", f"{row.share_of_roof:.0%}") if row.roof else ("", "")
    count = str(row.count) if row.op else ""
    return (row.name, row.op, count, seconds, share, *roof, f"{row.lost * 1e3:.3f} ms", row.bound)
