"""Emitters: an op as calls of a program, a function an op, in the module of the op's kernel.

An emitter takes the program's builder and the op's arguments, with views in the place of activations and packed
tensors in the place of weights, and returns the views of the op's results. An emitter that fuses quantization also
takes ``quantized``, the wanted int8 form of the first result, and returns q and scale after the results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optkit.kernels.cpu.program import Builder, View

Result = tuple[View | None, ...]


@dataclass(frozen=True)
class Emitter:
    """A row of a module's ``EMITTERS``: the op's name, its function, and True for a function with ``quantized``."""

    op: str
    emit: Callable[..., Result]
    fuses_quantization: bool = False


@dataclass(frozen=True)
class Arguments:
    """The arguments of an op: views in the place of activations, packed tensors in the place of weights.

    In a chain, the result of the previous op is None.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class Chain:
    """A row of a module's ``CHAINS``: ops in one call, where each op is the only reader of the previous result.

    ``emit`` takes the builder and the arguments of each op, and returns the view of the last op's result. For layers
    better served by separate calls, ``emit`` raises NotImplementedError before adding anything.
    """

    ops: tuple[str, ...]
    emit: Callable[..., View]


@dataclass(frozen=True)
class Quantization:
    """The wanted int8 form of an op's result.

    Attributes:
        group_size: channels that share a scale; 0: all.
        keep: true where the float result is wanted too.
    """

    group_size: int
    keep: bool


def quantized_buffers(b: Builder, like: View, wanted: Quantization | None) -> tuple[Any, Any, int]:
    """Buffers for q and scale of a result of the shape of ``like``, and the group; empty without ``wanted``."""
    if wanted is None:
        return None, None, 0
    *each, columns = like.shape
    group = wanted.group_size or columns
    q = b.buffer(like.rows, like.shape, torch.uint8)
    return q, b.buffer(like.rows, (*each, columns // group)), group
