"""Following a replica: the router knows its blocks and its queue, until it is gone."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from optkit.fleet.follow import follow
from optkit.fleet.replica import BlockChanges, Mark, ReplicaGone, ReplicaReport
from optkit.fleet.router import Router


def test_a_replica_is_followed_until_it_is_gone() -> None:
    asked: list[Mark] = []

    async def report(since: Mark) -> ReplicaReport:
        asked.append(since)
        if len(asked) > 3:
            raise ReplicaGone("the node died", was_begun=False)
        changes = BlockChanges(Mark("e", len(asked)), is_snapshot=len(asked) == 1, added=(bytes(32),))
        return ReplicaReport(replica_id="a", version="1", kv_blocks_total=4, changes=changes)

    async def main() -> None:
        router = Router()
        task = asyncio.create_task(follow(router, SimpleNamespace(replica_id="a", report=report), 0.01))
        while len(asked) < 2:
            await asyncio.sleep(0.001)
        assert router.reports["a"].version == "1" and len(router.index) == 1
        await asyncio.wait_for(task, 10)
        assert router.reports == {} and len(router.index) == 0

    asyncio.run(main())
    assert asked == [Mark(), Mark("e", 1), Mark("e", 2), Mark("e", 3)]


def test_a_fault_of_the_caller_is_no_end_of_the_replica() -> None:
    async def report(since: Mark) -> ReplicaReport:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        asyncio.run(follow(Router(), SimpleNamespace(replica_id="a", report=report)))
