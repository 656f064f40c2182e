"""gptq on graphs: the error, orders of rounding, uneven groups, progress, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from optkit.errors import UserError
from optkit.graph.verify import verify
from optkit.kernels import reference
from optkit.passes import load
from optkit.passes.base import PassContext
from tests.support.correlated import TEXT, correlated, error, quantized
from tests.support.graphs import CONTEXT, assert_origins_invert, captured, checked
from tests.support.target import TARGET


@pytest.mark.parametrize("scheme", ["W4A8", "W4A16_ASYM"])
def test_gptq_is_closer_than_rounding_to_nearest(scheme: str) -> None:
    plain, better = (quantized("llama", r, scheme=scheme, group_size=32) for r in ("rtn", "gptq"))
    verify(better)
    assert_origins_invert(better)
    assert error(better, "llama") < 0.8 * error(plain, "llama")


@pytest.mark.parametrize("name", ["gemma2", "phi"])
def test_gptq_keeps_origins_on_other_architectures(name: str) -> None:
    graph = quantized(name, "gptq", scheme="W4A16", group_size=32)
    verify(graph)
    assert_origins_invert(graph)
    assert 0 < error(graph, name) < 1


@pytest.mark.parametrize(
    "options", [{"actorder": "group", "scheme": "W3A16"}, {"actorder": None, "clip": False}]
)
def test_gptq_stores_channel_groups_only_with_actorder_group(options: dict[str, Any]) -> None:
    graph = quantized("llama", "gptq", fuse=False, group_size=32, **options)
    verify(graph)
    assert_origins_invert(graph)
    assert 0 < error(graph, "llama") < 1
    (node, *_) = graph.calls(reference.linear_wna16)
    assert (node.args[4] is not None) == (options["actorder"] == "group")


def test_gptq_refuses_actorder_group_on_fused_layers() -> None:
    with pytest.raises(UserError, match="set actorder: static, or leave fuse_qkv"):
        quantized("llama", "gptq", scheme="W4A16", actorder="group")


@pytest.mark.parametrize("uneven", ["smaller", "ragged"])
def test_gptq_makes_smaller_or_ragged_groups_where_the_size_does_not_divide(uneven: str) -> None:
    graph = quantized("llama", "gptq", scheme="W4A16", group_size=64, uneven_groups=uneven)
    verify(graph)
    down = graph.weights["model.layers.0.mlp.down_proj.weight_scale"].value
    assert down.shape[1] == {"smaller": 3, "ragged": 2}[uneven]
    assert error(graph, "llama") < 0.6


def test_gptq_reports_its_estimate_before_and_beside_the_measurement() -> None:
    told: list[str] = []
    graph = correlated("llama").clone()
    pass_class = load("gptq")
    optimization = pass_class(pass_class.Config(scheme="W4A8", group_size=32, calibration=TEXT))
    say: Callable[..., None] = lambda text, part=None: told.append(text)  # noqa: E731
    context = replace(CONTEXT, progress=say)
    optimization.apply(graph, optimization.check(graph, context), context)
    assert "calibrating on 32 samples, about" in told[0] and "GB of memory" in told[0]
    assert "took" in told[-1] and "(expected" in told[-1]


def test_gptq_raises_without_calibration_text() -> None:
    graph = captured("llama")
    optimization, plan = checked(graph, "gptq")
    with pytest.raises(ValueError, match="calibration"):
        optimization.apply(graph, plan, PassContext(TARGET))
