"""Schemes by name, groups that don't fit, and which layers: targets and ignore as llm-compressor reads them."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from optkit.errors import UserError
from optkit.kernels import reference
from optkit.passes.quantization.formats import Int4Format, Int8Format, PackedFormat, WeightFormat
from optkit.passes.quantization.schemes import fitting, make_format
from optkit.passes.resolve import resolve_passes
from optkit.recipe.load import parse_recipe
from tests.support.graphs import apply, captured, checked


@pytest.mark.parametrize(
    ("scheme", "group_size", "expected"),
    [
        ("W4A16", None, PackedFormat(4, 128, True)),
        ("w4a16_asym", 64, PackedFormat(4, 64, False)),
        ("W8A16", None, Int8Format(0, weight_only=True)),
        ("W8A16", 48, PackedFormat(8, 48, True)),
        ("W8A16_ASYM", 0, PackedFormat(8, 0, False)),
        ("W3A16", 32, PackedFormat(3, 32, True)),
        ("INT8", None, Int8Format(0)),
        ("W8A8", 32, Int8Format(32)),
        ("W4A8", None, Int4Format(64, True, 64)),
        ("W4A8_ASYM", None, Int4Format(32, False, 32)),
    ],
)
def test_a_scheme_is_a_format(scheme: str, group_size: int | None, expected: WeightFormat) -> None:
    assert make_format(scheme, group_size) == expected


@pytest.mark.parametrize(
    ("scheme", "group_size", "message"),
    [
        ("W4A61", None, "there is no scheme 'W4A61'; did you mean 'W4A16'"),
        ("FP8_DYNAMIC", None, "a floating-point scheme"),
        ("W3A8", None, "no op multiplies 3-bit weights by int8 activations; use W3A16"),
        ("W8A8_ASYM", None, "no op multiplies asymmetric 8-bit weights by int8 activations; use W8A8"),
        ("W4A8", 16, "W4A8 takes a group_size of 32, 64, 96, 128, 192, not 16"),
        ("W8A8", 48, "W8A8 takes a group_size of 0, 32, 64, 96, 128, 192, not 48"),
    ],
)
def test_nonsense_is_refused_by_name(scheme: str, group_size: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        make_format(scheme, group_size)


@pytest.mark.parametrize("name", ["rtn", "gptq", "awq"])
def test_a_recipe_with_a_bad_scheme_names_the_line(name: str) -> None:
    recipe = parse_recipe(f"schema_version: 1\nname: x\npasses:\n  {name}: {{scheme: W4A17}}\n")
    with pytest.raises(UserError, match="there is no scheme 'W4A17'"):
        resolve_passes(recipe)


@pytest.mark.parametrize(
    ("k", "uneven", "expected"),
    [
        (256, "skip", PackedFormat(4, 128)),
        (576, "smaller", PackedFormat(4, 64)),
        (96, "smaller", PackedFormat(4, 32)),
        (576, "ragged", PackedFormat(4, 128)),
        (
            576,
            "skip",
            "its 576 input channels are not a multiple of the group size 128 (uneven_groups: skip)",
        ),
        (
            100,
            "smaller",
            "its 100 input channels are not a multiple of the group size 128 or of a smaller one",
        ),
    ],
)
def test_groups_that_do_not_divide(k: int, uneven: str, expected: WeightFormat | str) -> None:
    assert fitting(make_format("W4A16"), "W4A16", k, uneven) == expected  # type: ignore[arg-type]


def test_int8_activations_have_no_ragged_groups() -> None:
    reason = fitting(make_format("W8A8", 64), "W8A8", 96, "ragged")
    assert isinstance(reason, str) and "only weight-only schemes" in reason


@pytest.mark.parametrize(
    "options", [{"targets": []}, {"targets": ["re:("]}, {"ignore": ["re:*"]}, {"group_size": -1}, {"bits": 4}]
)
def test_options_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        checked(captured("llama"), "rtn", **options)


def test_every_scheme_has_its_op() -> None:
    ops = {"W4A8": reference.linear_w4a8, "W8A8": reference.linear_w8a8, "W8A16": reference.linear_w8a16}
    for scheme in ("W2A16", "W3A16", "W4A16", "W4A16_ASYM", "W8A16_ASYM", "W4A8", "W8A8", "W8A16"):
        graph = captured("llama")
        apply(graph, "rtn", scheme=scheme, group_size=32)
        assert len(list(graph.calls(ops.get(scheme, reference.linear_wna16)))) == 14, scheme
