"""A raylet of three ends by SIGKILL in mid-stream: the answers go on, and a new node gets a new replica."""

from __future__ import annotations

from bench.fleet.nodes import MODEL, MOST, NODES, killed
from bench.fleet.ray_clusters import several_nodes
from bench.fleet.update import mock_config
from tests.support.fleet import on_loop


@on_loop
async def test_answers_survive_the_death_of_a_node() -> None:
    with several_nodes(mock_config(MODEL, "0" * 64, NODES), NODES, cpus=1) as nodes:
        found = await killed(nodes, kills=1, streams=6)
    assert found["streams that lost their node"] > 0
    assert {name: found[name] for name in MOST if found[name] > MOST[name]} == {}
