"""PyTorch's ops outside of the dialect: each name is an op of the installed torch, and no op says where results lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from optkit.graph.ops.aten import ATEN_OPS, PLACEMENT, POINTWISE, SCALAR_OPS, aten, is_creator


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


# Types of arguments that a graph file can express and that name no file, pointer or generator.
PLAIN = {"Tensor", "List[Tensor]", "Optional[Tensor]", "List[Optional[Tensor]]", "int", "float", "number", "bool",
         "str", "List[int]", "Optional[int]", "Optional[float]", "Optional[number]", "Optional[bool]", "Optional[str]",
         "Optional[List[int]]", "Optional[ScalarType]"}  # fmt: skip
# The size of the result depends on values: a mask as an index, and the number of classes where none is given.
BY_VALUES = {"index.Tensor", "one_hot.default"}


@pytest.mark.parametrize("name", ATEN_OPS)
def test_aten_op_is_a_function_of_plain_arguments(name: str) -> None:
    op = aten(name)
    assert not op._schema.is_mutable
    assert not {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view} & set(op.tags)
    by_values = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(op.tags)
    assert not by_values or name in BY_VALUES
    assert "empty" not in name, "memory that was never written holds what another request left there"
    arguments = [a for a in op._schema.arguments if a.name not in PLACEMENT]
    assert {str(argument.real_type) for argument in arguments} <= PLAIN


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_op_keeps_places_apart(name: str) -> None:
    """Another order of the elements before the op is the same order after the op."""
    op, order = aten(name), torch.tensor([3, 0, 2, 1])
    whole = name.startswith("bitwise")
    generator = torch.Generator().manual_seed(0)

    def argument(kind: str, position: int) -> Any:
        if kind == "Tensor" or (kind == "Optional[Tensor]" and position < 2):
            x = torch.rand(4, 5, generator=generator) * 0.8 + 0.1
            return x > 0.5 if name == "where.self" and position == 0 else (x * 9).long() if whole else x
        return (
            2
            if whole
            else {"number": 0.5, "Optional[number]": 0.5, "float": 0.5, "Optional[str]": "floor"}[kind]
        )

    if name == "masked_fill.Scalar":
        args: list[Any] = [torch.rand(4, 5), torch.rand(4, 5) > 0.5, 2.0]
    else:
        kinds = [
            (str(a.real_type), a)
            for a in op._schema.arguments
            if not a.kwarg_only or not a.has_default_value()
        ]
        needed = [kind for kind, a in kinds if not a.has_default_value() or a.name == "min"]
        args = [argument(kind, position) for position, kind in enumerate(needed)]
    keywords = {
        a.name: args.pop() for a in op._schema.arguments if a.kwarg_only and not a.has_default_value()
    }
    turned = [a[order] if isinstance(a, torch.Tensor) else a for a in args]
    before, after = op(*turned, **keywords), op(*args, **keywords)
    torch.testing.assert_close(before, after[order], equal_nan=True)
    assert before.shape == after.shape == (4, 5)


def test_creators_are_the_ops_on_numbers_alone() -> None:
    creators = {name for name in ATEN_OPS if is_creator(aten(name))}
    assert creators == {
        "arange.default",
        "arange.start",
        "arange.start_step",
        "full.default",
        "scalar_tensor.default",
    }


def test_scalar_ops_compute_with_integers() -> None:
    assert SCALAR_OPS["int_mul"](6, 7) == 42 and SCALAR_OPS["int_add"](40, 2) == 42
