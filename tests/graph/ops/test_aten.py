"""PyTorch's ops outside of the dialect: each name is an op of the installed torch, and no op says where results lie."""

from __future__ import annotations

import pytest
import torch

from optkit.graph.ops.aten import ATEN_OPS, PLACEMENT, SCALAR_OPS, aten


@pytest.mark.parametrize("name", ATEN_OPS)
def test_aten_finds_the_overload_of_the_name(name: str) -> None:
    found = aten(name)
    assert isinstance(found, torch._ops.OpOverload)
    assert str(found) == f"aten.{name}"


def test_placement_holds_every_keyword_of_a_device_or_a_layout() -> None:
    words = ("Device", "Layout", "MemoryFormat")
    keywords = {
        argument.name
        for name in ATEN_OPS
        for argument in aten(name)._schema.arguments
        if any(word in str(argument.real_type) for word in words)
    }
    assert keywords <= set(PLACEMENT)


def test_scalar_ops_compute_with_integers() -> None:
    assert SCALAR_OPS["int_mul"](6, 7) == 42 and SCALAR_OPS["int_add"](40, 2) == 42
