"""The examination of a new version inside a Ray cluster (imports Ray): an application for as long as it lasts.

The command that updates a fleet has nothing but the dashboard's REST API. So the verdict is the state of an
application: running is a pass, and a failed start has the reason in its message.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ray import serve

from optkit.fleet.engine import FleetEngine
from optkit.fleet.examine import Exam, compared, same_tokenizer, tested
from optkit.fleet.member import Member
from optkit.fleet.ray_handle import RayMembers
from optkit.fleet.rollout import Verdict
from optkit.machine import logs

log = logging.getLogger("optkit.fleet")

EXAM = "Examination"  # name of the deployment
START_SECONDS = 60.0  # until both replicas have reported


class Examination:
    """Examines when constructed; raises RuntimeError with the reason of a failure."""

    async def __init__(self, args: dict[str, Any]) -> None:  # type: ignore[misc]
        logs.configure()
        exam = Exam.read(args)
        verdict = await examined(exam)
        log.info("%s of %s: %s", exam.kind, exam.canary, verdict)
        if not verdict.passed:
            raise RuntimeError(verdict.reason)


async def examined(exam: Exam) -> Verdict:
    """The verdict of ``exam`` on the replicas of the cluster."""
    try:
        is_same = not (exam.new and exam.old) or await asyncio.to_thread(same_tokenizer, exam.new, exam.old)
    except OSError as error:
        return Verdict(False, f"the tokenizers can't be compared: {error}")
    if not is_same:
        return Verdict(
            False, "the tokenizer is another: deploy it under another --name, or with --strategy recreate"
        )
    engine = FleetEngine(RayMembers(exam.fleet))
    try:
        info = await engine.start(START_SECONDS)
        if exam.kind == "test":
            return await tested(await _member(engine, exam.canary), info.vocab_size)
        canary, baseline = [await _member(engine, name) for name in (exam.canary, exam.baseline)]
        return await compared(canary, baseline, info.vocab_size, exam.bound)
    finally:
        await engine.stop()


async def _member(engine: FleetEngine, replica_id: str) -> Member:
    """The replica, once it has reported."""
    async with asyncio.timeout(START_SECONDS):
        while (found := engine.member(replica_id)) is None:
            await asyncio.sleep(0.05)
    return found


def exam_deployment() -> serve.Deployment:
    """The deployment of an examination, tried once."""
    options: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0}, "max_constructor_retry_count": 1}
    return serve.deployment(Examination, name=EXAM, num_replicas=1, **options)  # type: ignore[no-any-return]
