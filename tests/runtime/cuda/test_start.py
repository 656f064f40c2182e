"""Starting an engine on a GPU: memory for KV, and graphs before the first request."""

from __future__ import annotations

import pytest

from optkit.runtime.cuda.buckets import most_graphs
from optkit.runtime.cuda.device import HostDevice
from optkit.runtime.cuda.start import kv_cache_bytes, sized
from optkit.runtime.engine import Engine
from optkit.runtime.overlap import OverlapEngine
from optkit.runtime.runner import ModelRunner
from tests.support.host_device import CONFIG, GREEDY, model
from tests.support.tiny_runtime import prompts


def test_kv_gets_what_weights_and_the_largest_step_leave() -> None:
    device = HostDevice(memory=(900 << 20, 1 << 30))
    left = kv_cache_bytes(model(), CONFIG, device, 0.9)
    graphs = (8 << 20) * most_graphs(CONFIG.max_num_batched_tokens)
    assert left == int(0.9 * (1 << 30)) - ((1 << 30) - (900 << 20)) - graphs
    assert sized(model(), CONFIG, left).num_blocks > CONFIG.num_blocks


def test_a_full_device_is_refused() -> None:
    from optkit.errors import UserError

    with pytest.raises(UserError, match="KV cache"):
        kv_cache_bytes(model(), CONFIG, HostDevice(memory=(1 << 20, 1 << 30)), 0.9)


def test_a_loaded_engine_takes_what_the_gpu_has_left_unless_told() -> None:
    from optkit.recipe.engine_options import engine_options
    from optkit.recipe.load import load_recipe
    from optkit.runtime.factory import make_engine
    from optkit.runtime.scheduling.cost_model import CostModel
    from optkit.runtime.sizing import scheduler_config, with_kv_bytes

    recipe = load_recipe("ttft-h100", ["runtime.max_num_batched_tokens=64", "runtime.max_num_seqs=4"])
    gpu = HostDevice(memory=(700 << 20, 1 << 30))
    found = with_kv_bytes(model(), engine_options(recipe, {"gpu_memory_utilization": 0.8}), gpu)
    graphs = (8 << 20) * most_graphs(64)
    assert found.kv_cache_bytes == int(0.8 * (1 << 30)) - (324 << 20) - graphs
    given = engine_options(recipe, {"kv_cache_bytes": 1 << 20, "max_model_len": 64})
    assert with_kv_bytes(model(), given, gpu) is given
    config = scheduler_config(model(), given)
    engine = make_engine(model(), config, gpu, None, None, CostModel())
    assert isinstance(engine, OverlapEngine)
    plain = Engine(ModelRunner(model(), config.num_blocks, config.block_size), config)
    assert engine.generate(prompts(3), GREEDY) == plain.generate(prompts(3), GREEDY)
