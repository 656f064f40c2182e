"""The sizes of engines: recurrent states, and groups of layers with windows."""

from __future__ import annotations

from typing import Any

import pytest

from optkit.errors import UserError
from optkit.graph.kv_layout import one_group
from optkit.lowering.lower import lower
from optkit.recipe.engine_options import engine_options
from optkit.runtime.engine import Engine
from optkit.runtime.factory import make_engine
from optkit.runtime.runner import ModelRunner
from optkit.runtime.scheduling.cost_model import CostModel
from optkit.runtime.sizing import offloading, scheduler_config
from optkit.runtime.types import SamplingParams
from tests.support.graphs import captured
from tests.support.recurrent_model import RecurrentModel
from tests.support.shelf import RECIPE


def recurrent_config(hybrid: bool, **given: Any) -> Any:
    return scheduler_config(RecurrentModel(hybrid), engine_options(None, given))


STATE = 4 * (8 * 8 + 8 * 2)  # bytes of a sequence's states


def test_recurrent_model_gets_a_slot_a_request_and_checkpoints_within_its_share() -> None:
    config = recurrent_config(hybrid=True, kv_cache_bytes=1 << 16, max_num_seqs=3)
    assert (config.num_state_slots, config.num_checkpoints) == (3, (1 << 14) // STATE)
    assert recurrent_config(True, kv_cache_bytes=1 << 16, state_checkpoints=7).num_checkpoints == 7
    assert recurrent_config(True, kv_cache_bytes=1 << 16, enable_prefix_caching=False).num_checkpoints == 0
    few = {"kv_cache_bytes": 1 << 12, "max_num_seqs": 1, "block_size": 8}
    assert recurrent_config(True, **few).num_checkpoints == 4  # the fewest


@pytest.mark.parametrize("checkpoints", [None, 0, 7])
@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("total", [1 << 14, 1 << 16, 1 << 18])
def test_blocks_slots_and_checkpoints_fit_the_bytes_of_the_cache(
    hybrid: bool, checkpoints: int | None, total: int
) -> None:
    given = {"kv_cache_bytes": total, "state_checkpoints": checkpoints, "max_num_seqs": 64, "block_size": 8}
    config = recurrent_config(hybrid, **given)
    model = RecurrentModel(hybrid)
    runner = ModelRunner(
        model, config.num_blocks, 8, num_slots=config.num_state_slots + config.num_checkpoints
    )
    assert 0.9 * total * (hybrid or checkpoints is None) < runner.kv_bytes + runner.state_bytes <= total
    assert config.num_state_slots == config.max_num_seqs


def test_fewer_requests_run_when_the_cache_has_no_room_for_their_states(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = recurrent_config(True, kv_cache_bytes=1 << 14, max_num_seqs=64, block_size=8)
    assert config.max_num_seqs == config.num_state_slots == (1 << 13) // STATE
    assert "25 of 64 requests (max_num_seqs) run at once" in caplog.text


def test_cache_without_room_for_states_and_blocks_is_refused() -> None:
    with pytest.raises(UserError, match="3 recurrent states and 8 checkpoints and two blocks") as error:
        recurrent_config(True, kv_cache_bytes=1 << 11, max_num_seqs=64, state_checkpoints=8)
    assert error.value.where == "kv_cache_bytes"


def test_model_without_attention_gets_blocks_for_all_its_requests() -> None:
    config = recurrent_config(hybrid=False, max_num_seqs=3, state_checkpoints=2, block_size=32)
    assert config.num_blocks == (3 + 2) * 3 and config.max_model_len == 96


def test_offload_is_refused_when_the_model_is_recurrent() -> None:
    model = RecurrentModel()
    config = recurrent_config(hybrid=True)
    with pytest.raises(UserError, match="KV without the recurrent state") as error:
        offloading(config, model, 1 << 20, None)
    assert error.value.where == "kv_offload_bytes"


def test_a_model_with_windows_is_served_in_groups_and_gives_the_same_tokens() -> None:
    model = lower(captured("gemma3_text"))
    given = {"kv_cache_bytes": 1 << 18, "max_model_len": 128, "max_num_batched_tokens": 32, "max_num_seqs": 4}
    options = engine_options(RECIPE, given)
    config = scheduler_config(model, options)
    assert config.kv_windows == (0, 8, 8)
    engine = make_engine(model, config, None, None, None, CostModel())
    plain_config = scheduler_config(model, options, layout=one_group(model.states))
    plain = Engine(ModelRunner(model, plain_config.num_blocks, plain_config.block_size), plain_config)
    asked = [[3 + (7 * i + n) % 120 for i in range(50)] for n in range(5)]
    params = SamplingParams(max_tokens=20, temperature=0.0)
    assert engine.generate(asked, params) == plain.generate(asked, params)
    block = options.block_size * model.kv_specs[0].token_bytes
    assert (1 << 18) - block < engine.runner.kv_bytes <= 1 << 18
    found, before = (each.info().memory_plan for each in (engine, plain))
    assert found.num_bytes == engine.runner.kv_bytes and found.num_sequences > before.num_sequences
    assert found.num_tokens > before.num_tokens


def test_a_pool_too_small_for_two_blocks_of_each_group_is_refused() -> None:
    model = lower(captured("gemma3_text"))
    block = RECIPE.runtime.block_size * model.kv_specs[0].token_bytes
    options = engine_options(RECIPE, {"kv_cache_bytes": 7 * block - 1})
    with pytest.raises(UserError, match=f"do not hold 6 blocks \\({7 * block:,} bytes"):
        scheduler_config(model, options)
