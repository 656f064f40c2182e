"""Numbers in few digits, for tables and axes."""

from __future__ import annotations

from math import isfinite

NONE = "-"  # for a number that was not measured
UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def number(value: float | None, digits: int = 3) -> str:
    """``183``, ``7.3``, ``0.0042``, ``12,300``: significant digits without exponents, but for tiny numbers."""
    if value is None or not isfinite(value):
        return NONE if value is None else str(value)
    size = abs(value)
    if size >= 10**digits:
        return f"{value:,.0f}"
    text = f"{value:.{digits}g}"
    return text if "e" not in text or size < 1e-4 else f"{value:.0f}"


def tick(value: float) -> str:
    """A round number of an axis, with all digits: ``96.25``."""
    return number(value) if abs(value) >= 1e6 else f"{value:,.6g}"


def milliseconds(seconds: float | None) -> str:
    return NONE if seconds is None else f"{number(1e3 * seconds)} ms"


def size_text(num_bytes: float) -> str:
    """``163 MB``, in decimal units."""
    for unit, name in UNITS:
        if abs(num_bytes) >= unit:
            return f"{number(num_bytes / unit)} {name}"
    return f"{number(num_bytes)} bytes"


def share(value: float | None) -> str:
    return NONE if value is None else f"{value:.1%}"
