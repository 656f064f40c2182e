"""Messages between the server of a fleet and the replicas, as msgpack; never pickle.

A *link* is a connection of a server and a replica (``optkit.fleet.channel``). ``optkit.fleet.served_replica`` is the
replica's end with a queue of events for the server; ``take`` returns all events, at once or with the next event.
``optkit.fleet.remote_replica`` is the server's end. So a message carries all outputs of an engine's step, whatever
the number of requests, and none waits for a timer.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import Protocol

import msgspec

from optkit.fleet.replica import Mark, ReplicaReport, Work
from optkit.runtime.info import EngineInfo
from optkit.runtime.pooling import Pooling
from optkit.runtime.process.ipc import Embedded, PinList, Profiled
from optkit.runtime.types import TokenOutput


class Output(msgspec.Struct, frozen=True, array_like=True, tag="output"):
    """An output of the engine."""

    output: TokenOutput


class Gone(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """The fields of a stream's last exception, ``ReplicaGone``."""

    request_id: str
    reason: str
    was_begun: bool


class Sent(msgspec.Struct, frozen=True, array_like=True):
    """A request on the way to a replica, whose clock is another.

    Attributes:
        age: seconds since the request's arrival.
    """

    work: Work
    age: float

    @classmethod
    def now(cls, work: Work) -> Sent:
        return cls(work, time.monotonic() - work.request.arrival)

    def received(self) -> Work:
        """The work, with the arrival on the clock of the receiving process."""
        arrival = time.monotonic() - self.age
        request = msgspec.structs.replace(self.work.request, arrival=arrival)
        return msgspec.structs.replace(self.work, request=request)


class EmbedCall(msgspec.Struct, frozen=True, array_like=True):
    """The arguments of ``Member.embed``."""

    prompts: tuple[tuple[int, ...], ...]
    pooling: Pooling


Events = tuple[Output | Gone, ...]
NOTHING = b""  # the answer of ``take`` when nothing came for a while

encode = msgspec.msgpack.Encoder().encode
events: msgspec.msgpack.Decoder[Events] = msgspec.msgpack.Decoder(Events)
sent: msgspec.msgpack.Decoder[Sent] = msgspec.msgpack.Decoder(Sent)
mark: msgspec.msgpack.Decoder[Mark] = msgspec.msgpack.Decoder(Mark)
report: msgspec.msgpack.Decoder[ReplicaReport] = msgspec.msgpack.Decoder(ReplicaReport)
info: msgspec.msgpack.Decoder[EngineInfo | None] = msgspec.msgpack.Decoder(EngineInfo | None)
embed_call: msgspec.msgpack.Decoder[EmbedCall] = msgspec.msgpack.Decoder(EmbedCall)
embedded: msgspec.msgpack.Decoder[Embedded] = msgspec.msgpack.Decoder(Embedded)
pins: msgspec.msgpack.Decoder[PinList] = msgspec.msgpack.Decoder(PinList)
profiled: msgspec.msgpack.Decoder[Profiled] = msgspec.msgpack.Decoder(Profiled)


class Link(Protocol):
    """A connection to a replica; all methods but ``close`` raise ReplicaGone."""

    def submit(self, sent: bytes) -> None:
        """Begin a request (``Sent``), whose outputs come by ``take``."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request without a further output; an ended request is ignored."""
        ...

    def take(self) -> Awaitable[bytes]:
        """All events since the last call, or NOTHING when none came for a while."""
        ...

    def close(self) -> None: ...


class Stub(Protocol):
    """The calls of a replica in another process; all raise ReplicaGone.

    Arguments and answers are as in ``optkit.fleet.served_replica.ServedReplica``.
    """

    def link(self) -> Awaitable[Link]: ...

    def report(self, since: bytes) -> Awaitable[bytes]: ...

    def engine_info(self) -> Awaitable[bytes]: ...

    def embed(self, call: bytes) -> Awaitable[bytes]: ...

    def pins(self, drop: str | None) -> Awaitable[bytes]: ...

    def reset_prefix_cache(self) -> Awaitable[None]: ...

    def take_over(self, address: str, num_bytes: int) -> Awaitable[None]: ...

    def start_profile(self, steps: int) -> Awaitable[bytes]: ...

    def stop_profile(self, directory: str) -> Awaitable[bytes]: ...

    def drain(self) -> Awaitable[None]: ...
