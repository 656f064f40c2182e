"""gptq, awq, rtn, mixed_precision on graphs: how close, the same after a stop, and what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from optkit.errors import UserError
from optkit.graph.ir import Graph
from optkit.graph.verify import verify
from optkit.kernels import reference
from optkit.passes import load
from optkit.passes.base import PassContext
from optkit.passes.quantization import resume
from tests.support.graphs import (
    CONTEXT,
    TARGET,
    apply,
    assert_origins_invert,
    calibration,
    captured,
    checked,
    checkpoint,
    dense,
    random_ids,
)

TEXT = {"samples": 32, "length": 32}
FUSIONS = ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm")


@functools.cache
def correlated(name: str) -> Graph:
    """A tiny model whose activations have a few large channels, as those of trained models do."""
    graph = captured(name)
    generator = torch.Generator().manual_seed(3)
    for row, weight in graph.weights.items():
        if "layernorm" in row and weight.value.ndim == 1:
            weight.value = weight.value * torch.rand(len(weight.value), generator=generator).mul(3).exp()
    return graph


def quantized(name: str, row: str, fuse: bool = True, **options: Any) -> Graph:
    graph = correlated(name).clone()
    for fusion in FUSIONS if fuse else ():
        apply(graph, fusion)
    options |= {} if row == "rtn" else {"calibration": TEXT}
    pass_class = load(row)
    optimization = pass_class(pass_class.Config.model_validate(options))
    plan = optimization.check(graph, CONTEXT)
    assert optimization.apply(graph, plan, CONTEXT).changed == len(plan.sites) > 0
    return graph


def error(graph: Graph, name: str) -> float:
    """Squared error of the logits on other text than that calibrated on, over that of the float model's."""
    total = norm = 0.0
    for ids in random_ids((40, 37, 51)):
        expected = dense(correlated(name), ids)
        total += float((dense(graph, ids, TARGET) - expected).pow(2).sum())
        norm += float(expected.pow(2).sum())
    return total / norm


@pytest.mark.parametrize("scheme", ["W4A8", "W4A16_ASYM"])
@pytest.mark.parametrize("row", ["gptq", "awq"])
def test_closer_than_rounding(row: str, scheme: str) -> None:
    plain, better = (quantized("llama", r, scheme=scheme, group_size=32) for r in ("rtn", row))
    verify(better)
    assert_origins_invert(better)
    assert error(better, "llama") < (0.8 if row == "gptq" else 0.95) * error(plain, "llama")


@pytest.mark.parametrize("row", ["gptq", "awq"])
@pytest.mark.parametrize("name", ["gemma2", "phi"])
def test_other_architectures(name: str, row: str) -> None:
    graph = quantized(name, row, scheme="W4A16", group_size=32)
    verify(graph)
    assert_origins_invert(graph)
    assert 0 < error(graph, name) < 1


def test_awq_leaves_the_float_model_what_it_was() -> None:
    """Scales are folded: with 8 bits, where rounding is small, the logits are the float model's."""
    graph = quantized("llama", "awq", scheme="W8A16", group_size=32, clip=False)
    assert error(graph, "llama") < 0.01
    norm = "model.layers.0.input_layernorm.weight"
    assert not torch.equal(graph.weights[norm].value, correlated("llama").weights[norm].value)


@pytest.mark.parametrize(
    "options", [{"actorder": "group", "scheme": "W3A16"}, {"actorder": None, "clip": False}]
)
def test_other_orders(options: dict[str, Any]) -> None:
    graph = quantized("llama", "gptq", fuse=False, group_size=32, **options)
    verify(graph)
    assert_origins_invert(graph)
    assert 0 < error(graph, "llama") < 1
    (node, *_) = graph.calls(reference.linear_wna16)
    assert (node.args[4] is not None) == (options["actorder"] == "group")


def test_act_order_with_groups_of_its_own_needs_layers_of_their_own() -> None:
    with pytest.raises(UserError, match="set actorder: static, or leave fuse_qkv"):
        quantized("llama", "gptq", scheme="W4A16", actorder="group")


@pytest.mark.parametrize("uneven", ["smaller", "ragged"])
def test_uneven_groups(uneven: str) -> None:
    graph = quantized("llama", "gptq", scheme="W4A16", group_size=64, uneven_groups=uneven)
    verify(graph)
    down = graph.weights["model.layers.0.mlp.down_proj.weight_scale"].value
    assert down.shape[1] == {"smaller": 3, "ragged": 2}[uneven]
    assert error(graph, "llama") < 0.6


# -- a run that was stopped --------------------------------------------------------------------------------


class Stopped(BaseException):
    """As abrupt as a kill: nothing catches it."""


def stop_after(patch: pytest.MonkeyPatch, writes: int) -> None:
    """Stop at a write of finished work, ``writes`` writes from now."""
    original, left = resume.write, [writes]

    def write(file: Path, tensors: Any) -> None:
        if not left[0]:
            raise Stopped
        left[0] -= 1
        original(file, tensors)

    patch.setattr(resume, "write", write)


@pytest.mark.parametrize("stop", [1, 9])
@pytest.mark.parametrize(
    ("row", "options"),
    [
        ("gptq", {"scheme": "W4A8", "group_size": 32}),
        ("awq", {"scheme": "W4A16", "group_size": 32}),
        ("mixed_precision", {"schemes": ["W4A8:32", "W8A8:32"], "bits": 6.5, "sensitivity_tokens": 32}),
    ],
)
def test_it_goes_on_where_it_was_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str, options: dict[str, Any], stop: int
) -> None:
    def run(place: Path) -> tuple[dict[str, Tensor], int]:
        graph = correlated("llama").clone()
        for fusion in FUSIONS:
            apply(graph, fusion)
        told: list[str] = []

        def progress(text: str, /, *, part: tuple[int, int] | None = None) -> None:
            if part:
                told.append(text)

        pass_class = load(row)
        optimization = pass_class(pass_class.Config.model_validate(options | {"calibration": TEXT}))
        context = replace(CONTEXT, workspace=place, progress=progress)
        optimization.apply(graph, optimization.check(graph, context), context)
        return checkpoint(graph), len(told)

    expected, worked = run(tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_after(patch, stop)
        with pytest.raises(Stopped):
            run(tmp_path / "stopped")
    found, rest = run(tmp_path / "stopped")
    assert rest < worked or (row, stop) == ("awq", 1)  # before the first attention nothing is put aside
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    again, nothing = run(tmp_path / "stopped")
    assert nothing <= (2 if row == "awq" else 0)  # what came after the last walk that was put aside
    assert all(torch.equal(again[key], value) for key, value in expected.items())


def test_a_damaged_solution_is_made_again(tmp_path: Path) -> None:
    finished = resume.FinishedGroups(tmp_path, "codes")
    for index in range(3):
        finished.save(index, {"codes": torch.full((64,), index)})
    assert finished.count() == 3 and torch.equal(finished.load(1)["codes"], torch.ones(64, dtype=torch.int64))
    file = finished.solution_file(1)
    file.write_bytes(file.read_bytes()[:-3] + b"xyz")
    assert finished.count() == 1
    finished.save(1, {"codes": torch.ones(64)})
    assert finished.count() == 3


# -- mixed precision ---------------------------------------------------------------------------------------


def mixed(**options: Any) -> tuple[Graph, dict[str, Any]]:
    graph = correlated("llama").clone()
    for fusion in FUSIONS:
        apply(graph, fusion)
    pass_class = load("mixed_precision")
    options = {"schemes": ["W4A8:32", "W8A8:32"], "sensitivity_tokens": 64, "calibration": TEXT} | options
    optimization = pass_class(pass_class.Config.model_validate(options))
    plan = optimization.check(graph, CONTEXT)
    return graph, optimization.apply(graph, plan, CONTEXT).stats


def test_a_budget_of_bits_is_kept_and_used() -> None:
    graph, stats = mixed(bits=6.5)
    verify(graph)
    assert 5.0 < stats["bits_per_weight"] <= 6.5
    assert stats["assigned"]["W4A8:32"] > 0 and stats["assigned"]["W8A8:32"] > 0
    small, _ = mixed(bits=4.6)
    assert error(graph, "llama") < error(small, "llama")
    assert len(list(graph.calls(reference.linear_w8a8))) == stats["assigned"]["W8A8:32"]


def test_the_most_sensitive_layers_get_the_bits() -> None:
    _, stats = mixed(bits=6.5)
    worst = [name for name, _ in stats["most_sensitive"]]
    assert set(stats["upgraded"]) & set(worst[:3])


def test_a_budget_of_divergence() -> None:
    _, stats = mixed(max_kld=1e9)
    assert stats["assigned"] == {"W4A8:32": 8, "W8A8:32": 0}
    _, tight = mixed(max_kld=stats["expected_kld"] / 2)
    assert tight["assigned"]["W8A8:32"] > 0


def test_milliseconds_as_the_price() -> None:
    graph, stats = mixed(bits=6.5, price="milliseconds")
    verify(graph)
    assert stats["bits_per_weight"] <= 6.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give one of bits"),
        ({"bits": 5.0, "max_kld": 0.1}, "give one of bits"),
        ({"bits": 5.0, "schemes": ["W4A8", "W9A9"]}, "there is no scheme"),
        ({"bits": 5.0, "schemes": ["W4A8:x", "W8A8"]}, "is not a scheme"),
    ],
)
def test_nonsense_budgets(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load("mixed_precision").Config.model_validate(options)


def test_a_budget_below_the_smallest_formats_is_an_error() -> None:
    with pytest.raises(UserError, match="smallest"):
        mixed(bits=3.0)


# -- what it asks for --------------------------------------------------------------------------------------


def test_an_estimate_is_told_before_and_beside_the_measurement() -> None:
    told: list[str] = []
    graph = correlated("llama").clone()
    pass_class = load("gptq")
    optimization = pass_class(pass_class.Config(scheme="W4A8", group_size=32, calibration=TEXT))
    say: Callable[..., None] = lambda text, part=None: told.append(text)  # noqa: E731
    context = replace(CONTEXT, progress=say)
    optimization.apply(graph, optimization.check(graph, context), context)
    assert "calibrating on 32 samples, about" in told[0] and "GB of memory" in told[0]
    assert "took" in told[-1] and "(expected" in told[-1]


def test_a_plan_without_weights_needs_no_text() -> None:
    """Dry runs have shapes only."""
    graph = captured("llama")
    for weight in graph.weights.values():
        weight.value = weight.value.to("meta")
    for row in ("rtn", "gptq", "awq"):
        copy = graph.clone()
        optimization, plan = checked(copy, row, scheme="W4A16", group_size=32)
        assert optimization.apply(copy, plan, PassContext(TARGET)).changed == 14
        verify(copy)


def test_without_calibration_text_it_refuses() -> None:
    graph = captured("llama")
    optimization, plan = checked(graph, "gptq")
    with pytest.raises(ValueError, match="calibration"):
        optimization.apply(graph, plan, PassContext(TARGET))


def test_calibration_text_of_the_tests_is_what_was_asked_for() -> None:
    assert [len(window) for window in calibration(load("gptq").Config(calibration=TEXT).calibration)] == [
        32
    ] * 32
