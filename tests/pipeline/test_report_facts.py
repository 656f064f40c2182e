"""Facts of a report: the floor below every prediction, and a memory plan of the recipe's sizes."""

from __future__ import annotations

from optkit.graph.shapes import Point
from optkit.lowering.cost import predict_seconds
from optkit.machine.target import DATASHEETS, Target
from optkit.pipeline.report_facts import LENGTHS, facts
from optkit.recipe.load import parse_recipe
from tests.support.graphs import captured

RECIPE = "schema_version: 1\nname: small\ntarget: cpu\npasses: []\nruntime: {kv_cache_bytes: 1MiB, block_size: 16}\n"
MACHINE = Target("cpu", "cpu", (), 2, 1 << 34, 2e11, 8e11, 0.0, 0.0, 3e10, "measured")


def test_the_floor_is_below_the_prediction_and_grows_with_the_prompt() -> None:
    graph, recipe = captured("llama"), parse_recipe(RECIPE)
    for target in (MACHINE, DATASHEETS["cuda-h100"]):
        floor = facts(graph, recipe, target)["floor"]
        assert [tokens for tokens, _ in floor] == [n for n in LENGTHS if n <= graph.meta.max_model_len] != []
        times = [seconds for _, seconds in floor]
        assert times == sorted(times) and times[0] > 0
        for tokens, seconds in floor:
            assert seconds < predict_seconds(graph, Point(tokens, 1, tokens), target)


def test_the_memory_plan_has_weights_states_pool_and_the_largest_step() -> None:
    graph = captured("llama")
    plan = facts(graph, parse_recipe(RECIPE), MACHINE)["memory"]
    assert plan["weight_bytes"] == graph.num_bytes()
    assert plan["pool_bytes"] == 1 << 20
    assert plan["token_bytes"] == sum(spec.token_bytes for spec in graph.meta.kv_specs)
    assert plan["kv_tokens"] * plan["token_bytes"] <= 1 << 20
    assert plan["activation_bytes"] > 0 and plan["step_tokens"] <= plan["max_model_len"]
