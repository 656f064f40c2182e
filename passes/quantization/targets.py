"""Selection of linear layers by llm-compressor's ``targets`` and ``ignore``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import fx

from optkit.errors import UserError, nearest
from optkit.graph import ops
from optkit.graph.ir import Graph, module_name

LINEAR = "Linear"  # the class name that stands for all linear layers


def members(graph: Graph, node: fx.Node, name: str) -> list[str]:
    """The modules of the checkpoint that linear ``name`` is made of: itself, or those that were fused into it."""
    weight = graph.weight_of(ops.weight(node))
    parts = weight.origin.parts if weight is not None and weight.origin is not None else ()
    return [module_name(part.name) for part in parts] if len(parts) > 1 else [name]


def listed(patterns: Sequence[str], graph: Graph, node: fx.Node, name: str) -> bool:
    """True when one of ``patterns`` names site ``name`` or a module that was fused into it."""
    return any(matches_any(patterns, member) for member in [*members(graph, node, name), name])


def matches_any(patterns: Sequence[str], name: str) -> bool:
    return any(matches(pattern, name) for pattern in patterns)


def matches(pattern: str, name: str) -> bool:
    """llm-compressor's grammar: ``re:`` patterns match from the start, plain names match whole or as a suffix."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return name == pattern or name.endswith("." + pattern)


def check_pattern(pattern: str) -> None:
    """Raise ValueError for a ``re:`` pattern that is none."""
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            raise ValueError(f"'{pattern}' is not a regular expression: {error}") from error


def check_targets(targets: Sequence[str], graph: Graph, linears: Mapping[fx.Node, str]) -> None:
    """Refuse a target that names no linear layer: a typo there would leave a model in float."""
    names = {member for node, name in linears.items() for member in [*members(graph, node, name), name]}
    for target in targets:
        if target != LINEAR and names and not any(matches(target, name) for name in names):
            fix = nearest(target.rpartition(".")[2], {name.rpartition(".")[2] for name in names} | {LINEAR})
            raise UserError(f"target '{target}' is no linear layer of this model", where="targets", fix=fix)
