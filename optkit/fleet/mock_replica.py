"""A replica with a mock engine in the event loop of the caller, for tests and measurements with many replicas.

The steps of the engine run in the loop, and the seconds of a step pass by ``asyncio.sleep``. So on a loop with virtual
time an hour of a fleet takes seconds. ``kill`` is the death of the engine: every stream ends with ``ReplicaGone``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from optkit.fleet.mock import EngineKilled, MockModel, mock_engine
from optkit.fleet.replica import Mark, ReplicaGone, ReplicaReport, Work
from optkit.recipe.engine_options import EngineOptions
from optkit.runtime.engine import Engine
from optkit.runtime.scheduling.cost_model import step_work
from optkit.runtime.types import EngineRefusal, FinishReason, ScheduledRequest, TokenOutput

PREFILL_SIZES = (256, 512, 1024, 2048)  # tokens of ``ReplicaReport.prefill_seconds``, after 0


@dataclass(eq=False)
class _Stream:
    outputs: asyncio.Queue[TokenOutput | ReplicaGone] = field(default_factory=asyncio.Queue)
    is_begun: bool = False


class MockReplica:
    """Implements ``optkit.fleet.replica.Replica``.

    Args:
        model: ``load_seconds`` pass in ``start``.
        version: digest of the artifact that the model stands for.

    Attributes:
        on_death: called at each death of an engine.
        num_starts: engines so far.
        busy_seconds: in which a step ran.
    """

    def __init__(
        self, replica_id: str, model: MockModel, version: str = "v1", options: EngineOptions | None = None
    ) -> None:
        self._id, self.model, self.version, self._options = replica_id, model, version, options
        self._engine: Engine | None = None
        self._streams: dict[str, _Stream] = {}
        self._stepping: asyncio.Task[None] | None = None
        self._owed = 0.0  # seconds of the running step
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_draining = False
        self.on_death: Callable[[MockReplica], None] | None = None
        self.num_starts, self.busy_seconds = 0, 0.0

    @property
    def replica_id(self) -> str:
        return self._id

    @property
    def is_ready(self) -> bool:
        """An engine lives."""
        return self._engine is not None

    @property
    def num_streams(self) -> int:
        """Requests that are being served."""
        return len(self._streams)

    async def start(self) -> None:
        """Load an engine, also after a death."""
        await asyncio.sleep(self.model.load_seconds)
        self._owed, self.num_starts = 0.0, self.num_starts + 1
        loop = asyncio.get_running_loop()
        self._engine = mock_engine(
            self.model, self._options, self._owe, lambda: loop.time() + self._owed, _die
        )
        self._engine.scheduler.announce = self._begun

    def kill(self) -> None:
        """End the engine; ``start`` starts another one."""
        if self._stepping is not None:
            self._stepping.cancel()
        was_alive = self._engine is not None
        self._engine = self._stepping = None
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            gone = ReplicaGone("the engine was killed", was_begun=stream.is_begun, replica_id=self._id)
            stream.outputs.put_nowait(gone)
        self._idle.set()
        if was_alive and self.on_death is not None:
            self.on_death(self)

    async def stop(self) -> None:
        """End the replica."""
        self.on_death = None
        self.kill()

    async def generate(self, work: Work) -> AsyncGenerator[TokenOutput, None]:
        request = work.request
        name, engine = request.request_id, self._engine
        if engine is None or self.is_draining:
            raise ReplicaGone("the replica takes no requests", was_begun=False, replica_id=self._id)
        try:
            engine.add_request(request)
        except EngineRefusal as error:
            yield TokenOutput(
                request_id=name, token_ids=(), finish_reason=FinishReason.ERROR, error=str(error)
            )
            return
        stream = self._streams[name] = _Stream()
        self._idle.clear()
        if self._stepping is None:
            self._stepping = asyncio.create_task(self._run(engine))
        try:
            while True:
                output = await stream.outputs.get()
                if isinstance(output, ReplicaGone):
                    raise output
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            if self._streams.get(name) is stream:
                del self._streams[name]
                engine.abort(name)
            if not self._streams:
                self._idle.set()

    async def report(self, since: Mark) -> ReplicaReport:
        engine = self._engine
        if engine is None:
            return ReplicaReport(replica_id=self._id, version=self.version, is_ready=False)
        scheduler, stats, cost = engine.scheduler, engine.stats(), engine.scheduler.cost
        prompts = [r for r in scheduler.running + scheduler.waiting if r.num_pending > 1]
        step = cost.seconds(
            step_work(ScheduledRequest(r, 1) for r in scheduler.running if r.num_pending == 1)
        )
        return ReplicaReport(
            replica_id=self._id,
            version=self.version,
            is_draining=self.is_draining,
            queue_seconds=sum(cost.prefill_seconds(r.num_pending, r.num_held) for r in prompts) + step,
            prefill_seconds=(0.0, *map(cost.prefill_seconds, PREFILL_SIZES)),
            decode_seconds=step,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            waiting_tokens=sum(r.num_pending for r in prompts),
            kv_blocks_used=stats.kv_blocks_used,
            kv_blocks_total=stats.kv_blocks_total,
            block_size=engine.config.block_size,
            stats=stats,
        )

    async def drain(self) -> None:
        self.is_draining = True
        await self._idle.wait()

    async def _run(self, engine: Engine) -> None:
        """Step while there is work."""
        try:
            while engine.has_work:
                outputs = engine.step()
                seconds, self._owed = self._owed, 0.0
                await asyncio.sleep(seconds)
                self.busy_seconds += seconds
                for output in outputs:
                    if stream := self._streams.get(output.request_id):
                        stream.outputs.put_nowait(output)
                        if output.finish_reason is not None:
                            del self._streams[output.request_id]
                if not self._streams:
                    self._idle.set()
            self._stepping = None
        except EngineKilled:
            self._stepping = None
            self.kill()

    def _begun(self, names: Sequence[str]) -> None:
        for name in names:
            if stream := self._streams.get(name):
                stream.is_begun = True

    def _owe(self, seconds: float) -> None:
        self._owed += seconds


def _die() -> None:
    raise EngineKilled
