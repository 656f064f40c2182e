"""Messages of replicas: every field of an engine's report is one of the replica's report, and back from msgpack."""

from __future__ import annotations

import msgspec

from optkit.fleet.replica import BlockChanges, Mark, ReplicaReport, replica_report
from optkit.runtime.report import EngineReport


def test_a_report_of_an_engine_is_a_part_of_the_report_of_its_replica() -> None:
    engine = EngineReport(
        queue_seconds=0.5,
        prefill_seconds=(0.1, 0.2, 0.3, 0.4, 0.5),
        kv_blocks_host=3,
        holds_ends=True,
        changes=BlockChanges(Mark("e", 3), added=(b"a",)),
    )
    found = replica_report(engine, "r1", "v1", is_draining=True, peer_address="127.0.0.1:9")
    assert (found.replica_id, found.version, found.is_draining) == ("r1", "v1", True)
    for name in EngineReport.__struct_fields__:
        assert getattr(found, name) == getattr(engine, name)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=ReplicaReport) == found
