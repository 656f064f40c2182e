"""States of layers: graph inputs, pools and bytes."""

from __future__ import annotations

import pytest
import torch

from optkit.graph.ir import BATCH_INPUTS, GraphMeta
from optkit.graph.states import (
    KVSpec,
    RecurrentSpec,
    named_pools,
    sequence_bytes,
    state_bytes,
    state_inputs,
    token_bytes,
)

KV = KVSpec(0, 2, 8, 4)
WINDOWED = KVSpec(1, 2, 8, 4, window=5)
CONV, RECURRENT = (
    RecurrentSpec(2, "conv_state", (6, 3)),
    RecurrentSpec(2, "recurrent_state", (2, 4, 8), "bfloat16"),
)


def test_state_bytes_agree_with_the_pools() -> None:
    states = (KV, CONV, RECURRENT)
    pools = named_pools(states, num_blocks=3, block_size=4, num_slots=5)
    assert {name: tuple(pool.shape) for name, pool in pools.items()} == {
        "k_cache_0": (3, 4, 2, 8),
        "v_cache_0": (3, 4, 2, 4),
        "conv_state_2": (5, 6, 3),
        "recurrent_state_2": (5, 2, 4, 8),
    }
    assert pools["recurrent_state_2"].dtype is torch.bfloat16
    assert sum(pool.nbytes for pool in pools.values()) == 12 * token_bytes(states) + 5 * sequence_bytes(
        states
    )


@pytest.mark.parametrize(("dtype", "row"), [("float32", 4 * 576), ("bfloat16", 2 * 576), ("int8", 576 + 4)])
def test_latent_kv_has_one_pool_and_the_bytes_of_its_keys(dtype: str, row: int) -> None:
    spec = KVSpec(3, 1, 576, 512, dtype, latent=True)
    pools = named_pools((spec,), num_blocks=2, block_size=4, num_slots=0)
    assert list(pools) == ["k_cache_3"] == list(spec.inputs)
    assert spec.token_bytes == row and pools["k_cache_3"].nbytes == 8 * row
    assert state_bytes((spec, spec), 100) == 200 * row


def test_latent_kv_is_refused_when_values_are_longer_than_keys() -> None:
    with pytest.raises(ValueError, match="values of 9 channels are no part of keys of 8"):
        KVSpec(0, 1, 8, 9, latent=True)


def test_state_bytes_of_a_windowed_layer_stop_at_the_window() -> None:
    row = 2 * (8 + 4) * 4
    assert state_bytes((KV, WINDOWED), 3) == 6 * row
    assert state_bytes((KV, WINDOWED), 100) == 105 * row
    assert state_bytes((CONV, RECURRENT), 100) == state_bytes((CONV, RECURRENT), 1) == 6 * 3 * 4 + 64 * 2


def test_inputs_have_slots_when_a_state_is_recurrent() -> None:
    assert state_inputs((KV,)) == ("k_cache_0", "v_cache_0")
    assert state_inputs((KV, CONV)) == ("k_cache_0", "v_cache_0", "conv_state_2", "state_slots")
    assert GraphMeta("", 1, 1, (CONV,), "", "").inputs == (*BATCH_INPUTS, "conv_state_2", "state_slots")


def test_with_kv_specs_keeps_recurrent_states() -> None:
    meta = GraphMeta("", 1, 1, (CONV, KV), "", "").with_kv_specs([WINDOWED])
    assert meta.kv_specs == (WINDOWED,) and meta.recurrent_specs == (CONV,)


@pytest.mark.parametrize(
    "wrong",
    [{"dtype": "int8"}, {"name": "a b"}, {"shape": ()}, {"shape": (3, 0)}, {"shape": (1 << 20,) * 3}],
    ids=str,
)
def test_recurrent_spec_is_refused_when_a_field_is_wrong(wrong: dict) -> None:
    with pytest.raises(ValueError, match="state"):
        RecurrentSpec(**{"layer": 0, "name": "conv_state", "shape": (1,)} | wrong)
