"""The memory plan: sums by hand, limits of the scheduler, and the values alive in a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from optkit.graph.shapes import Point
from optkit.machine.target import DATASHEETS
from optkit.plan.memory import SERVER_BYTES, activation_bytes, memory_plan
from optkit.recipe.load import load_recipe
from tests.support.graphs import apply, captured
from tests.support.target import TARGET

RECIPE = load_recipe("ttft-cpu", ["runtime.kv_cache_bytes=1MiB", "runtime.max_num_seqs=4"])
KV_TOKEN = 2 * 2 * 2 * 16 * 4  # bytes: layers, K and V, heads, channels, float32


def test_the_parts_add_up_to_the_memory_that_is_left() -> None:
    graph = captured("llama")
    found = memory_plan(graph, RECIPE, TARGET, [64])
    assert found.weights == sum(w.nbytes for w in graph.weights.values()) and found.process == SERVER_BYTES
    left = found.available - found.weights - found.activations - found.process
    assert found.most_kv == pytest.approx(left) and found.kv_cache == 1 << 20
    assert found.kv_token == KV_TOKEN and found.fits


@pytest.mark.parametrize("context", [33, 100, 256])
def test_requests_at_once_are_the_blocks_of_the_pool_over_those_of_a_request(context: int) -> None:
    found = memory_plan(captured("llama"), RECIPE, TARGET, [context])
    blocks = (1 << 20) // (32 * KV_TOKEN)
    each = -(-context // 32)
    assert found.requests[context] == min(4, blocks // each)
    assert found.limit[context] == ("max_num_seqs" if blocks // each >= 4 else "KV cache")
    assert found.most_requests[context] > found.requests[context]


def test_a_context_beyond_the_model_fits_never() -> None:
    found = memory_plan(captured("llama"), RECIPE, TARGET, [512])
    assert found.requests[512] == 0 and "model's context of 256 tokens" in found.limit[512]


def test_a_context_beyond_the_kv_cache_names_the_kv_cache() -> None:
    small = load_recipe("ttft-cpu", ["runtime.kv_cache_bytes=64KiB", "runtime.max_num_seqs=4"])
    found = memory_plan(captured("llama"), small, TARGET, [200])
    assert found.requests[200] == 0 and "longer than the KV cache of" in found.limit[200]


def test_int8_kv_takes_fewer_bytes() -> None:
    graph = captured("llama")
    apply(graph, "kv_int8")
    assert memory_plan(graph, RECIPE, TARGET, [64]).kv_token == 2 * 2 * 2 * (16 + 4)


def test_a_window_bounds_the_blocks_of_a_request() -> None:
    recipe = load_recipe(
        "ttft-cpu",
        ["runtime.kv_cache_bytes=64KiB", "runtime.block_size=4", "runtime.max_num_batched_tokens=16"],
    )
    full = memory_plan(captured("llama"), recipe, TARGET, [200])
    windowed = memory_plan(captured("mistral"), recipe, TARGET, [200])
    assert windowed.kv_token == full.kv_token
    assert windowed.config is not None and full.config is not None
    assert windowed.config.blocks_needed(200, 1) < full.config.blocks_needed(200, 1)


def test_a_gpu_gives_the_rest_to_kv_and_narrows_weights() -> None:
    graph, recipe = captured("llama"), load_recipe("ttft-h100")
    found = memory_plan(graph, recipe, DATASHEETS["cuda-h100"], [64])
    assert found.available == 0.9 * 80e9 and found.process == 0
    assert found.weights < 0.6 * graph.num_bytes() and found.kv_cache == found.most_kv > 70e9
    assert found.kv_token == KV_TOKEN / 2


def test_weights_that_do_not_fit_are_said() -> None:
    found = memory_plan(captured("llama"), RECIPE, replace(TARGET, memory_bytes=1 << 20), [64])
    assert not found.fits and found.requests == {} and found.most_kv == 0


def test_values_alive_hold_the_largest_and_stay_below_all() -> None:
    graph, tokens = captured("llama"), 64
    total = activation_bytes(graph, Point(tokens, 1, tokens), 16)
    hidden, mlp = tokens * 64 * 4, tokens * 96 * 4
    assert hidden + 2 * mlp <= total <= 6 * hidden + 3 * mlp  # residual, gate and up; a few more rows at most


def test_views_take_no_memory() -> None:
    graph = captured("llama")
    apply(graph, "fuse_qkv")
    fused = activation_bytes(graph, Point(64, 1, 64), 16)
    assert fused <= activation_bytes(captured("llama"), Point(64, 1, 64), 16) * 1.01
