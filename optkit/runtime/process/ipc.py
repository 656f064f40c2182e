"""Messages between the API process and the engine process, and their frames.

A frame is a 4-byte big-endian length and as many bytes of msgpack. A message is a tagged ``msgspec.Struct``, or the
outputs of a step as an array. So decoding checks types and can build nothing else; never pickle, which runs code. The
pipe is a socket pair inherited by the child: no port, no file, no other process can connect. A frame over ``MAX_FRAME``
bytes or an undecodable frame is a ``ProtocolError`` and ends the connection; real sizes are far from the limit.
"""

from __future__ import annotations

import struct

import msgspec

from optkit.kernels.cpu.decode_steps import TOKEN_BYTES
from optkit.recipe.engine_options import EngineOptions
from optkit.runtime.info import EngineInfo
from optkit.runtime.kv.peers import PeerSetup
from optkit.runtime.pooling import Pooling
from optkit.runtime.prefill import PinInfo
from optkit.runtime.report import EngineReport, Mark
from optkit.runtime.types import EngineRequest, EngineStats, TokenOutput

MAX_FRAME = 32 * 2**20  # a prompt of a million tokens is 5 MB
HEADER = struct.Struct(">I")
UINT32 = struct.Struct(">BI")  # of msgpack: 0xCE and the number


class ProtocolError(Exception):
    """The peer sent invalid bytes."""


class Load(msgspec.Struct, frozen=True, tag="load"):
    """The first message: the arguments of the engine factory, and the deployment's secret.

    Attributes:
        cache_secret: begins the digests of cached blocks, for comparisons between the processes of a fleet; empty
            for a random secret. The secret is no option: options are shown in logs and answers.
        peers: for an exchange of KV with engines of the secret; None: for an engine alone.
    """

    artifact_dir: str
    options: EngineOptions
    cache_secret: bytes = b""
    peers: PeerSetup | None = None

    def __repr__(self) -> str:
        return f"Load({self.artifact_dir!r}, {self.options!r})"


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    """Drop the KV outside of running requests."""


class Embed(msgspec.Struct, frozen=True, tag="embed"):
    """Compute the vectors of ``prompts``, which an ``Embedded`` answers."""

    request_id: str
    prompts: tuple[tuple[int, ...], ...]
    pooling: Pooling


class AskPins(msgspec.Struct, frozen=True, tag="ask_pins"):
    """List the pinned prefixes, after the pin ``drop`` has ended; a ``PinList`` answers."""

    request_id: str
    drop: str | None = None


class TakeOver(msgspec.Struct, frozen=True, tag="take_over"):
    """Fetch the most recently used blocks of the leaving engine at ``address``, up to ``num_bytes`` of KV."""

    address: str
    num_bytes: int


class AskReport(msgspec.Struct, frozen=True, tag="ask_report"):
    """Report load, predictions and the changes of cached blocks after a mark; a ``Reported`` answers, in a step too."""

    request_id: str
    since: Mark = Mark()


class StartProfile(msgspec.Struct, frozen=True, tag="start_profile"):
    """Record up to ``steps`` steps of each phase from now on; a ``Profiled`` answers."""

    request_id: str
    steps: int


class StopProfile(msgspec.Struct, frozen=True, tag="stop_profile"):
    """Write the profile into ``directory``; a ``Profiled`` answers when the files are written."""

    request_id: str
    artifact_dir: str
    directory: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Leave now; requests in flight are dropped."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded."""

    info: EngineInfo


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """The engine begins to compute the named requests. Sent before the step, which may end the process."""

    request_ids: tuple[str, ...]


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The worker is idle, or has finished a part of a long step. ``Outputs`` follow each step."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Loading failed. With ``is_user_error`` the fields belong to a ``UserError``; else only ``what`` is set."""

    what: str
    where: str | None = None
    fix: str | None = None
    is_user_error: bool = False


class Embedded(msgspec.Struct, frozen=True, tag="embedded"):
    """The answer to an ``Embed``: ``vectors`` are float32 [prompts, size], row by row; with ``error`` there are none.

    Attributes:
        is_user_error: the request can't be served; else the model failed.
    """

    request_id: str
    vectors: bytes = b""
    size: int = 0
    error: str | None = None
    is_user_error: bool = False


class PinList(msgspec.Struct, frozen=True, tag="pins"):
    """The pinned prefixes, the oldest first; with ``error`` there is no engine to ask."""

    request_id: str
    pins: tuple[PinInfo, ...] = ()
    error: str | None = None


class Reported(msgspec.Struct, frozen=True, tag="reported"):
    """The answer to an ``AskReport``; without a ``report`` there is no engine to ask, for the reason ``error``."""

    request_id: str
    report: EngineReport | None = None
    error: str | None = None


class Profiled(msgspec.Struct, frozen=True, tag="profiled"):
    """The answer to a ``StartProfile`` or a ``StopProfile``.

    Attributes:
        files: the written files.
        steps: the number of recorded steps of each phase.
        error: the reason why nothing was started or written.
        is_conflict: a profile is being recorded already, or none was started.
    """

    request_id: str
    files: tuple[str, ...] = ()
    steps: dict[str, int] = {}
    error: str | None = None
    is_conflict: bool = False


Outputs = tuple[TokenOutput, ...]  # of one step
Question = Embed | AskPins | AskReport | StartProfile | StopProfile
ToWorker = Load | EngineRequest | Abort | ResetPrefixCache | TakeOver | Question | Shutdown
Answer = Embedded | PinList | Profiled | Reported  # to a question with the same ``request_id``
FromWorker = Ready | Begun | Outputs | EngineStats | Heartbeat | Answer | Failed

to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_encoder = msgspec.msgpack.Encoder()


def frame(message: ToWorker | FromWorker) -> bytes:
    """The bytes of ``message`` on the pipe."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise ProtocolError(f"a message of {len(body)} bytes is larger than {MAX_FRAME}")
    return HEADER.pack(len(body)) + body


def frame_with_places(outputs: Outputs, token: int) -> tuple[bytes, list[int]]:
    """The frame of ``outputs``, which have ``token`` each, and the place of each token's four bytes in the frame.

    Raises:
        ValueError: ``token`` takes another number of bytes, or an output has not this one token.
    """
    if not 2**16 <= token < 2**32 or any(output.token_ids != (token,) for output in outputs):
        raise ValueError(f"each output must have the token {token} alone, of 2^16 to 2^32 - 1")
    data, packed = (
        frame(outputs),
        UINT32.pack(0xCE, token),
    )  # no text in UTF-8 has 0xCE before a byte below 0x80
    places, start = list[int](), 0
    for _ in outputs:
        start = data.index(packed, start) + UINT32.size
        places.append(start - TOKEN_BYTES)
    return data, places


def body_length(header: bytes | bytearray) -> int:
    """The length a frame header announces."""
    (length,) = HEADER.unpack(header)
    if length > MAX_FRAME:
        raise ProtocolError(f"a frame of {length} bytes is larger than {MAX_FRAME}")
    return int(length)


class FrameReader:
    """Splits a byte stream into messages for the worker: ``feed`` takes bytes and returns complete messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[ToWorker]:
        self._buffer += data
        messages = []
        while (body := self._next_body()) is not None:
            try:
                messages.append(to_worker.decode(body))
            except msgspec.MsgspecError as error:
                raise ProtocolError(str(error)) from None
        return messages

    def _next_body(self) -> bytes | None:
        if len(self._buffer) < HEADER.size:
            return None
        end = HEADER.size + body_length(self._buffer[: HEADER.size])
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[HEADER.size : end])
        del self._buffer[:end]
        return body
