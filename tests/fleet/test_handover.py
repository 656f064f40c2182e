"""The heir of a replica that leaves."""

from __future__ import annotations

from optkit.fleet.handover import HAND_OVER_SHARE, budget, heir
from tests.fleet.test_placement import report


def test_the_replica_with_most_room_inherits_and_one_that_cannot_take_blocks_never() -> None:
    leaving = report("a", is_draining=True)
    full, roomy = report("b", kv_blocks_total=100, kv_blocks_used=90), report("c", kv_blocks_total=100)
    assert heir(leaving, [full, roomy]) is roomy
    for other in ({"version": "w"}, {"kv_layout": "m"}, {"is_ready": False}, {"is_draining": True}):
        assert heir(leaving, [full, report("d", kv_blocks_total=900, **other)]) is full
    assert heir(leaving, []) is None
    assert heir(report("a", peer_address=""), [roomy]) is None
    assert budget(roomy) == HAND_OVER_SHARE * 100 * roomy.block_bytes
