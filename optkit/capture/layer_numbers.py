"""The number of the layer that is being traced, which names the KV cache or the recurrent state of the layer.

A layer's module has its number as ``layer_idx``. A module that serves several layers (Zamba2's shared attention) has a
negative number, and gets the number of the layer in each call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from optkit.errors import UnsupportedModel

current_layers: list[int] = []  # the innermost last


def layer_number(kind: str) -> int:
    """The number of the layer that is being traced.

    Raises:
        UnsupportedModel: the layer has no number, so the state would have no name.
    """
    if not current_layers:
        raise UnsupportedModel(f"{kind} has no layer number")
    return current_layers[-1]


@contextmanager
def numbered(model: nn.Module) -> Iterator[None]:
    """Inside, ``layer_number`` follows the calls of the modules of ``model``."""
    hooks = [hook for module in model.modules() for hook in numbering(module)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        current_layers.clear()


def numbering(module: nn.Module) -> list[Any]:
    """Hooks that keep ``current_layers`` while ``module`` runs; none for a module without a layer number."""
    layer = getattr(module, "layer_idx", None)
    if type(layer) is not int:
        return []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        given = kwargs.get("layer_idx")
        current_layers.append(given if layer < 0 and type(given) is int else layer)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        current_layers.pop()

    return [module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave)]
