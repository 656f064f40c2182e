"""Selection of linear layers by llm-compressor's ``targets`` and ``ignore``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import AfterValidator
from torch import fx

from optkit.errors import UserError, nearest
from optkit.graph import ops
from optkit.graph.ir import Graph, module_name

LINEAR = "Linear"  # the class name that stands for all linear layers


def members(graph: Graph, node: fx.Node, name: str) -> list[str]:
    """The modules of linear ``name`` in the checkpoint: several for a fused linear."""
    weight = graph.weight_of(ops.weight(node))
    parts = weight.origin.parts if weight is not None and weight.origin is not None else ()
    return [module_name(part.name) for part in parts] if len(parts) > 1 else [name]


def listed(patterns: Sequence[str], graph: Graph, node: fx.Node, name: str) -> bool:
    """True when ``patterns`` name site ``name`` or a module fused into the site."""
    return any(matches_any(patterns, member) for member in [*members(graph, node, name), name])


def matches_any(patterns: Sequence[str], name: str) -> bool:
    return any(matches(pattern, name) for pattern in patterns)


def matches(pattern: str, name: str) -> bool:
    """llm-compressor's grammar: ``re:`` patterns match from the start, plain names match whole or as a suffix."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return name == pattern or name.endswith("." + pattern)


def compiling(patterns: list[str]) -> list[str]:
    """``patterns`` themselves; raises ValueError for an invalid ``re:`` pattern."""
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as error:
                raise ValueError(f"'{pattern}' is not a regular expression: {error}") from error
    return patterns


Patterns = Annotated[list[str], AfterValidator(compiling)]  # of modules, an option of a pass


def check_targets(
    targets: Sequence[str], graph: Graph, linears: Mapping[fx.Node, str], option: str = "targets"
) -> None:
    """Refuse a pattern of ``option`` without a linear layer of the name: a typo would leave a model in float."""
    names = {member for node, name in linears.items() for member in [*members(graph, node, name), name]}
    for target in targets:
        if target != LINEAR and names and not any(matches(target, name) for name in names):
            fix = nearest(target.rpartition(".")[2], {name.rpartition(".")[2] for name in names} | {LINEAR})
            raise UserError(
                f"{option.removesuffix('s')} '{target}' is no linear layer of this model",
                where=option,
                fix=fix,
            )
