"""Following a replica: reports to the router, a few times a second."""

from __future__ import annotations

import asyncio

from optkit.fleet.replica import Replica, ReplicaGone
from optkit.fleet.router import Router

REPORT_SECONDS = 0.25  # between two questions


async def follow(router: Router, replica: Replica, seconds: float = REPORT_SECONDS) -> None:
    """Keep the router's view of ``replica`` right, until the replica is gone and forgotten.

    A question waits for the answer before the next; a hanging replica is left out of decisions as stale.
    """
    while True:
        since, asked = router.mark(replica.replica_id), router.clock()
        try:
            report = await replica.report(since)
        except ReplicaGone:
            router.remove(replica.replica_id)
            return
        router.update(report, since, asked)
        await asyncio.sleep(seconds)
