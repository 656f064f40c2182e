"""The conditions of a run: processor, target, instruction sets, versions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from optkit.pages.html import Markup, element, prose_table
from optkit.pages.numbers import size_text
from optkit.pipeline.report import target_line

LONGEST = 400  # characters of a value


def block(title: str, rows: Iterable[tuple[str, str]]) -> list[Markup]:
    kept = [(name, value[:LONGEST]) for name, value in rows if value]
    return [element("h3", title), prose_table(("condition", "value"), kept)] if kept else []


def artifact_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The machine that measured the passes, and the versions."""
    target, machine = report["target"], report.get("machine") or {}
    versions = report.get("environment") or {}
    return [
        ("processor", text_of(machine.get("cpu"))),
        ("target", target_line(target)),
        ("instruction sets", listed(target.get("isa"))),
        ("native kernels", text_of(machine.get("kernels"))),
        ("memory", size_of(target.get("memory_bytes"))),
        ("versions", listed(versions)),
    ]


def text_of(value: Any) -> str:
    return str(value) if isinstance(value, (str, int, float)) else ""


def size_of(value: Any) -> str:
    return size_text(value) if isinstance(value, (int, float)) and value else ""


def listed(value: Any) -> str:
    """``torch 2.13, numpy 2.4`` of an object, ``avx2, fma`` of a list; empty for anything else."""
    if isinstance(value, dict):
        return ", ".join(
            f"{key} {item}" for key, item in value.items() if isinstance(item, (str, int, float))
        )
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else ""
