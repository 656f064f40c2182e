"""KV blocks between engines: a server of published blocks, and a client to fill the prefix cache.

Both run in threads of the engine process, with the KV pool at hand on every device. A thread holds the engine's turn
for the copy of a block, and never in wait of a peer, so steps are not delayed (``optkit.runtime.kv.exchange``).
Whatever goes wrong ends a connection and nothing else: missing blocks are computed.

For a prompt computed by the source (prefill apart from decode) the server queues a request without an answer
(``Prefill.is_urgent``) and sends each block once published, while the next chunk is computed.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from optkit.fleet.kv_wire import (
    MAX_WANTED,
    Channel,
    CorruptTransfer,
    End,
    FromClient,
    Identity,
    Pull,
    PullRecent,
    TransferError,
    WantedBlock,
    from_client,
    join,
    welcome,
)
from optkit.runtime.kv.exchange import (
    LEASE_SECONDS,
    Adoption,
    BlockExchange,
    BlockKV,
    Incoming,
    Outgoing,
    Wanted,
    hot_paths,
    kept_groups,
)
from optkit.runtime.prefill import Prefill
from optkit.runtime.types import EngineRefusal, EngineRequest, SamplingParams

logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5.0
LISTEN_SECONDS = 60.0  # a connection without requests
MAX_CONNECTIONS = 64
WATCH_SECONDS = 0.2  # between two looks at a client that waits for a prompt
MISSING = "the block is not cached"
NOT_COMPUTED = "the prompt could not be computed"


class TransferServer:
    """Sends the blocks of an engine to engines with the same ``secret`` and ``identity``.

    Args:
        host, port: to listen at; port 0 is any.

    Attributes:
        address: host and port.
        num_sent: blocks sent so far.

    Raises:
        OSError: the address can't be had.
    """

    def __init__(
        self,
        exchange: BlockExchange,
        secret: bytes,
        identity: Identity,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._exchange, self._engine = exchange, exchange.engine
        self._secret, self._identity = secret, identity
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
        bound = self._listener.getsockname()[1]
        self.address = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"
        self.num_sent = 0
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._names = itertools.count()
        threading.Thread(target=self._listen, name="kv-listen", daemon=True).start()

    def close(self) -> None:
        """End all connections, and take no further."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for sock in self._connections:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed
                return
            with self._lock:
                is_full = len(self._connections) >= MAX_CONNECTIONS
                if not is_full:
                    self._connections.add(sock)
            if is_full:
                sock.close()
            else:
                threading.Thread(target=self._serve, args=(sock,), name="kv-send", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            channel = Channel(sock, HANDSHAKE_SECONDS)
            welcome(channel, self._secret, self._identity)
            while True:
                channel.extend(LISTEN_SECONDS)
                self._answer(channel, channel.receive(from_client))
        except (ConnectionError, TimeoutError):
            pass  # the client has left, or was silent for too long
        except (TransferError, OSError) as error:
            logger.warning("a KV transfer to another engine ended: %s", error)
        except Exception:
            logger.exception("a KV transfer to another engine failed")
        finally:
            with self._lock:
                self._connections.discard(sock)
            sock.close()

    def _answer(self, channel: Channel, request: FromClient) -> None:
        match request:
            case Pull() if len(request.wanted) <= MAX_WANTED:
                self._send_wanted(channel, request)
            case PullRecent(num_bytes):
                self._send_recent(channel, num_bytes)
            case _:
                raise TransferError("an unexpected message")

    def _send_wanted(self, channel: Channel, pull: Pull) -> None:
        num_groups = len(self._exchange.block_bytes)
        if any(not 0 <= group < num_groups for wanted in pull.wanted for group in wanted.groups):
            raise TransferError("a group of layers that does not exist")
        outgoing = Outgoing(self._exchange, [Wanted(each.digest, each.groups) for each in pull.wanted])
        name = ""
        try:
            if pull.prompt:
                name = self._compute(pull)
            for number in range(len(pull.wanted)):
                block = self._next(channel, outgoing, number, name)
                if block is None:
                    channel.send(End(NOT_COMPUTED if name else MISSING))
                    return
                self._send(channel, number, block)
            channel.send(End())
        except EngineRefusal as refusal:
            channel.send(End(str(refusal)))
        finally:
            self._give_up(name)
            outgoing.close()

    def _compute(self, pull: Pull) -> str:
        """Queue the prompt; returns the name of the request. Raises EngineRefusal."""
        request = EngineRequest(
            request_id=f"kv-{next(self._names)}",
            prompt_ids=pull.prompt,
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            arrival=time.monotonic(),
            priority=pull.priority,
            cache_salt=pull.salt,
            prefill=Prefill(is_urgent=True),
        )
        self._engine.add_request(request)
        self._engine.wake()
        return request.request_id

    def _next(self, channel: Channel, outgoing: Outgoing, number: int, name: str) -> BlockKV | None:
        """The wanted block ``number``, once published; None where there will be none."""
        turn = self._engine.turn
        with turn:
            while (block := outgoing.take(number)) is None:
                if not name or not self._engine.scheduler.is_serving(name):
                    return None
                turn.wait(WATCH_SECONDS)
                if channel.is_closed():
                    raise ConnectionError("the client has left")
            return block

    def _give_up(self, name: str) -> None:
        """Have the engine drop the request ``name``, unless finished."""
        with self._engine.turn:
            if name and self._engine.scheduler.is_serving(name):
                self._engine.abandoned.add(name)
        self._engine.wake()

    def _send_recent(self, channel: Channel, num_bytes: int) -> None:
        with self._engine.turn:
            nodes = list(hot_paths(self._exchange, num_bytes))
        for number, node in enumerate(nodes):
            with self._engine.turn:
                block = self._exchange.read(node, kept_groups(node))
            if block is not None:
                self._send(channel, number, block)
        channel.send(End())

    def _send(self, channel: Channel, number: int, block: BlockKV) -> None:
        channel.extend(LEASE_SECONDS)
        channel.send_block(number, block)
        self.num_sent += 1


@dataclass
class Pulled:
    """The result of a fetch.

    Attributes:
        seconds: with the connection, and with the time in which the source computed.
        num_rejected: blocks with other bytes than sent.
        reason: why blocks are missing; empty where all came.
    """

    num_blocks: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    num_rejected: int = 0
    reason: str = ""


class TransferClient:
    """A connection to the server of another engine. Use from a single thread; ``cancel`` may come from any.

    Args:
        seconds: for the connection.

    Raises:
        OSError: no server there, or no answer in time.
        TransferError: the server refuses, or does not know the secret.
    """

    def __init__(
        self, exchange: BlockExchange, address: str, secret: bytes, identity: Identity, seconds: float
    ) -> None:
        self._exchange = exchange
        self._memory = bytearray(sum(exchange.block_bytes))  # of a block, used again for the next
        end = time.monotonic() + seconds
        host, port = parse_address(address)
        self._sock = socket.create_connection((host, port), timeout=seconds)
        try:
            self._channel = Channel(self._sock, end - time.monotonic())
            join(self._channel, secret, identity)
        except BaseException:
            self._sock.close()
            raise

    def cancel(self) -> None:
        """End the connection; a waiting thread goes on with an error."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def pull(self, incoming: Incoming, seconds: float, request: EngineRequest | None = None) -> Pulled:
        """Fetch the wanted blocks of ``incoming``.

        Args:
            seconds: for all blocks; for each block, where the source computes.
            request: the source computes the prompt first; None fetches cached blocks alone.
        """
        wanted = tuple(WantedBlock(each.digest, each.groups) for each in incoming.wanted)
        result = Pulled()
        start = time.monotonic()
        with self._guarded(result):
            self._channel.extend(seconds)
            if request is None:
                self._channel.send(Pull(wanted))
            else:
                prompt = request.prompt_ids[: incoming.num_tokens]
                self._channel.send(Pull(wanted, prompt, request.cache_salt, request.priority))
            for expected in range(len(wanted) + 1):
                received = self._receive(result)
                if received is None:
                    break
                number, block = received
                if number != expected or expected == len(wanted):
                    raise TransferError("a block out of turn")
                if not incoming.accept(number, block):
                    raise TransferError("there is no room for further blocks")
                self._count(result, block)
                if request is not None:
                    self._channel.extend(seconds)
        result.seconds = time.monotonic() - start
        return result

    def pull_recent(self, adoption: Adoption, num_bytes: int, seconds: float) -> Pulled:
        """Fetch the most recently used blocks of the other engine, up to ``num_bytes`` of KV, in ``seconds``."""
        result = Pulled()
        start = time.monotonic()
        with self._guarded(result):
            self._channel.extend(seconds)
            self._channel.send(PullRecent(num_bytes))
            while (received := self._receive(result)) is not None:
                if adoption.accept(received[1]):
                    self._count(result, received[1])
        result.seconds = time.monotonic() - start
        return result

    def _receive(self, result: Pulled) -> tuple[int, BlockKV] | None:
        """The next block; None at the end."""
        received = self._channel.receive_block(memoryview(self._memory))
        if isinstance(received, End):
            result.reason = received.reason
            return None
        return received

    def _count(self, result: Pulled, block: BlockKV) -> None:
        result.num_blocks += 1
        result.num_bytes += block.data.nbytes

    @contextlib.contextmanager
    def _guarded(self, result: Pulled) -> Iterator[None]:
        """Record an error of the transfer as the reason why blocks are missing."""
        try:
            yield
        except CorruptTransfer as error:
            result.num_rejected += 1
            result.reason = str(error)
        except (TransferError, ValueError, OSError) as error:
            result.reason = str(error) or type(error).__name__


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[host]:port``.

    Raises:
        TransferError: no address.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise TransferError(f"{address!r:.100} is not host:port")
    return host, int(port)
