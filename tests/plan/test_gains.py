"""Gains of passes: those of a recipe multiply to the whole, and those left out go to their place."""

from __future__ import annotations

import math
from functools import partial

import pytest

from optkit.graph.ir import Graph
from optkit.kernels.cpu import native
from optkit.machine.target import DATASHEETS, Target
from optkit.passes.base import PassContext
from optkit.passes.resolve import resolve_passes
from optkit.plan.gains import Chain, costs_of, gains, left_out, place_of, resolved
from optkit.plan.planner import chain_of
from optkit.plan.steps import StepModel
from optkit.recipe.load import load_recipe
from optkit.recipe.schema import Recipe
from tests.support.graphs import captured
from tests.support.target import TARGET

WIDE = {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 512, "num_hidden_layers": 2}
SIZES = ["workload.prompt_tokens=[64]", "workload.output_tokens=16"]


def planned(graph: Graph) -> Graph:
    """``graph`` without values, as a plan captures it."""
    for weight in graph.weights.values():
        weight.value = weight.on_meta()
    return graph


def made(
    recipe: Recipe, target: Target = TARGET, source: Graph | None = None
) -> tuple[Chain, partial[object]]:
    predict = partial(costs_of, recipe=recipe, model=lambda graph: StepModel(graph, target))
    context = PassContext(target)
    graph = source or planned(captured("llama", **WIDE))
    return chain_of(graph, resolve_passes(recipe), context, lambda one: predict(one).objective), predict


def test_the_gains_of_a_recipe_multiply_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "multiplies_bfloat16", lambda: False)  # the target of tests has no such units
    recipe = load_recipe("ttft-cpu", SIZES)
    chain, predict = made(recipe)
    found = gains(chain, predict)
    assert [one.name for one in found] == [entry.name for entry in recipe.passes]
    whole = predict(chain.graphs[0]).objective / predict(chain.result).objective
    assert math.prod(one.objective for one in found) == pytest.approx(whole)
    best = max(found, key=lambda one: one.objective)
    assert best.name == "int8" and best.objective > 1.2


def test_baseline_is_told_to_quantize() -> None:
    recipe = load_recipe("baseline", SIZES)
    chain, predict = made(recipe)
    found = {one.name: one for one in left_out(chain, PassContext(TARGET), predict)}
    assert {"int8", "w4a8"} <= set(found) and not set(found) & {"fp8", "kv_fp8"}
    assert min(found[name].steps["decode@65"] for name in ("w4a8", "int8")) > 1.2
    ordered = left_out(chain, PassContext(TARGET), predict)
    assert [one.objective for one in ordered] == sorted((one.objective for one in ordered), reverse=True)


def test_a_pass_of_the_recipe_is_not_left_out() -> None:
    recipe = load_recipe("ttft-cpu", SIZES)
    chain, predict = made(recipe)
    names = {one.name for one in left_out(chain, PassContext(TARGET), predict)}
    assert not names & {entry.name for entry in recipe.passes}


def test_a_pass_goes_before_the_passes_of_its_stage() -> None:
    recipe = load_recipe("ttft-cpu")
    passes = list(resolve_passes(recipe))
    names = [entry.name for entry in recipe.passes]
    assert names[place_of(resolved("w4a8", {}), passes)] == "int8"
    assert place_of(resolved("fuse_qkv", {}), passes) == 0


def test_memory_is_an_objective_too() -> None:
    recipe = load_recipe("edge-cpu", SIZES)
    chain, predict = made(recipe)
    found = {one.name: one.objective for one in gains(chain, predict)}
    assert found["w4a8"] > 1.5 and found["kv_int8"] > 1.0


def test_a_gpu_recipe_is_planned_without_a_gpu() -> None:
    recipe = load_recipe("ttft-h100", SIZES)
    chain, predict = made(recipe, DATASHEETS["cuda-h100"])
    assert predict(chain.result).objective < predict(chain.graphs[0]).objective * 1.01
