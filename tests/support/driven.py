"""An engine driven by a thread as by a process, for tests of transfers between engines."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from optkit.fleet.peers import EnginePeers
from optkit.runtime.engine import Engine
from optkit.runtime.kv.peers import KVSource
from optkit.runtime.types import EngineRequest, FinishReason, FirstToken, SamplingParams
from tests.support.engine_process import PATIENCE

SECRET = bytes(range(32))


class Driven:
    """Steps ``engine`` while there is work, until ``close``."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._awake = threading.Event()
        engine.wake = self._awake.set
        self._changed = threading.Condition()
        self._tokens: dict[str, list[int]] = {}
        self._first: dict[str, FirstToken] = {}
        self._ends: dict[str, FinishReason] = {}
        self._ended = False
        self.checks = True  # all invariants after each step
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended = True
        self._awake.set()
        self._thread.join(PATIENCE)
        if self.engine.peers is not None:
            self.engine.peers.close()

    def add(self, request: EngineRequest) -> None:
        """Queue ``request``, after the fetch."""
        peers = self.engine.peers
        if request.source is not None and peers is not None and peers.fetch(request, self._queue):
            return
        self._queue(request)

    def answer(self, request: EngineRequest) -> tuple[list[int], int]:
        """The tokens of the answer, and the cached tokens of the prompt."""
        self.add(request)
        name = request.request_id
        with self._changed:
            assert self._changed.wait_for(lambda: name in self._ends, PATIENCE), "no answer came"
            assert self._ends[name] in (FinishReason.LENGTH, FinishReason.STOP)
            return self._tokens[name], self._first[name].cached_tokens

    def _queue(self, request: EngineRequest) -> None:
        self.engine.add_request(msgspec.structs.replace(request, source=None))
        self._awake.set()

    def _run(self) -> None:
        while not self._ended:
            if not self.engine.has_work:
                self._awake.wait(0.01)
                self._awake.clear()
                continue
            outputs = self.engine.step()
            if self.checks:
                with self.engine.turn:
                    self.engine.scheduler.check()
            with self._changed:
                for output in outputs:
                    self._tokens.setdefault(output.request_id, []).extend(output.generated_ids)
                    if output.first is not None:
                        self._first[output.request_id] = output.first
                    if output.finish_reason is not None:
                        self._ends[output.request_id] = output.finish_reason
                self._changed.notify_all()


@contextmanager
def driven(*engines: Engine, secret: bytes = SECRET, version: str = "v") -> Iterator[list[Driven]]:
    """``engines`` with an exchange of KV, each driven by a thread."""
    for engine in engines:
        engine.share_digests(secret)
        engine.peers = EnginePeers(engine, secret, version)
    made = [Driven(engine) for engine in engines]
    try:
        yield made
    finally:
        for each in made:
            each.close()


def ask(
    name: str,
    prompt: list[int],
    source: Engine | str | None = None,
    *,
    computes: bool = False,
    max_tokens: int = 6,
    salt: str = "",
) -> EngineRequest:
    """A greedy request, whose KV is fetched from ``source``, an engine or an address."""
    address = source.peers.address if isinstance(source, Engine) and source.peers else source
    return EngineRequest(
        request_id=name,
        prompt_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        arrival=0.0,
        cache_salt=salt,
        source=KVSource(address=str(address), computes=computes) if address else None,
    )
