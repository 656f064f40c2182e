"""Options for some of the layers of a quantizer: ``overrides: {down_proj: {scheme: W8A16}}``.

The patterns are those of ``targets``; the first pattern that fits a layer counts. Only options of a layer's format and
rounding can be overridden, the ``overridable`` of a config, and options that are not named keep the value of the pass.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import BaseModel, Field, ValidationError, model_validator
from torch import fx

from optkit.errors import nearest
from optkit.graph.ir import Graph
from optkit.passes.quantization.targets import compiling, matches, members
from optkit.passes.rewriting.stack import site_name


class LayerOverrides(BaseModel):
    """The option ``overrides``, a mix-in of configs."""

    overridable: ClassVar[tuple[str, ...]]

    overrides: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="other options for some layers, by name, suffix or 're:' pattern; the first that fits counts",
    )

    @model_validator(mode="after")
    def overrides_are_options(self) -> Self:
        compiling(list(self.overrides))
        for pattern, options in self.overrides.items():
            for key in options:
                if key not in self.overridable:
                    hint = nearest(key, self.overridable)
                    raise ValueError(f"overrides of '{pattern}': '{key}' is no option of a layer; {hint}")
            try:
                self.overridden(options)
            except ValidationError as error:
                first = error.errors(include_url=False, include_context=False)[0]
                where = ".".join(map(str, first["loc"]))
                message = first["msg"].removeprefix("Value error, ")
                raise ValueError(f"overrides of '{pattern}': {where}{': ' * bool(where)}{message}") from None
        return self

    def overridden(self, options: dict[str, Any]) -> Self:
        """The config of a layer with ``options``."""
        return type(self).model_validate(self.model_dump(exclude={"overrides"}) | options)


def layer_config(config: Any, graph: Graph, node: fx.Node) -> Any:
    """The config of linear ``node``: ``config`` with the first overrides that fit, or the reason against the layer."""
    name = site_name(graph, node)
    for pattern, options in getattr(config, "overrides", {}).items():
        found = [matches(pattern, member) for member in members(graph, node, name)]
        if all(found) or matches(pattern, name):
            return config.overridden(options)
        if any(found):
            return f"the overrides of '{pattern}' are for some of the layers fused into it"
    return config
