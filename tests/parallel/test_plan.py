"""The plan: where shares begin and end, and what is computed whole."""

from __future__ import annotations

from optkit.graph import ops
from optkit.parallel.plan import Action, Planner
from optkit.parallel.share import Share
from tests.support.graphs import apply, captured


def actions(name: str, size: int = 2, *passes: str, **overrides: object) -> dict[str, Action]:
    graph = captured(name, **overrides)
    for optimization in passes:
        apply(graph, optimization)
    plan = Planner(graph, size).plan()
    return {str(ops.weight(node).target): action for node, action in plan.actions.items() if ops.weight(node)}


def test_a_block_begins_with_columns_and_ends_with_a_sum() -> None:
    found = actions("llama")
    layer = "model.layers.1"
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    assert {found[f"{layer}.{name}.weight"] for name in columns} == {Action.COLUMNS}
    assert {found[f"{layer}.{name}.weight"] for name in ("self_attn.o_proj", "mlp.down_proj")} == {
        Action.ROWS
    }
    assert found["model.embed_tokens.weight"] is Action.TABLE


def test_units_of_the_reader_reach_the_layers_it_reads() -> None:
    graph = captured("llama", intermediate_size=96)
    apply(graph, "int8", group_size=32)
    planner = Planner(graph, 2)
    plan = planner.plan()
    shares = [share for share in plan.shares.values() if isinstance(share, Share) and share.parts == (96,)]
    assert shares and {share.unit % 32 for share in shares} == {0}
    assert shares[0].sizes(0, 2) == [32] and shares[0].sizes(1, 2) == [64]


def test_attention_without_a_share_for_every_rank_is_whole_and_its_kv_too() -> None:
    plan = Planner(captured("llama", num_key_value_heads=2), 4).plan()
    assert not plan.shared_pools
    assert any("heads" in reason or "shares" in reason for reason in plan.whole.values())


def test_experts_and_their_router_are_whole_with_reasons() -> None:
    plan = Planner(captured("mixtral"), 2).plan()
    reasons = set(plan.whole.values())
    assert "every rank has all experts" in reasons
    assert plan.shared_pools
