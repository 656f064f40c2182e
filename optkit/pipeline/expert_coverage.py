"""Calibration of experts in reports: the tokens of each layer's experts, and the experts rounded to nearest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

HEADER = (
    "experts of",
    "calibration tokens an expert: least, median, most",
    "rounded to nearest, too few tokens",
)
MOST_NAMED = 16


def rows(stats: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """A row for each layer of experts that a pass calibrated; none for other passes."""
    rounded = stats.get("rounded_experts", {})
    for site, tokens in stats.get("expert_tokens", {}).items():
        spread = f"{min(tokens):,}, {median(tokens):,.0f}, {max(tokens):,}"
        yield site, spread, named(rounded.get(site, {}))


def named(experts: Mapping[str, int]) -> str:
    """The experts with the tokens of each, the first ``MOST_NAMED`` of them: ``3 (12 tokens), 7 (0 tokens)``."""
    listed = [f"{expert} ({tokens:,} tokens)" for expert, tokens in experts.items()]
    more = f" and {len(listed) - MOST_NAMED} more" if len(listed) > MOST_NAMED else ""
    return ", ".join(listed[:MOST_NAMED]) + more or "none"


def summary(stats: Mapping[str, Any]) -> str:
    """The experts that a pass rounded for want of tokens, in a line; empty without calibrated experts."""
    layers = stats.get("expert_tokens", {})
    if not layers:
        return ""
    rounded = stats.get("rounded_experts", {})
    count, of = sum(map(len, rounded.values())), sum(map(len, layers.values()))
    if not count:
        return f"all {of:,} weights of experts saw {stats['expert_tokens_needed']} calibration tokens or more"
    first, experts = next(iter(rounded.items()))
    return (
        f"{count:,} of {of:,} weights of experts saw fewer than {stats['expert_tokens_needed']} calibration tokens "
        f"and are rounded to nearest, first {first} {named(experts)}"
    )
