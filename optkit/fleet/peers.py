"""The KV transfers of an engine: a server for other engines, and fetches before requests are queued.

A fetch costs no more than the predicted time to compute the tokens here: a fetch of cached blocks ends after so long, a
fetch of computed blocks after so long without a new block. Blocks at hand by then are used, the rest is computed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import msgspec

from optkit.errors import UserError
from optkit.fleet.kv_wire import Identity, TransferError
from optkit.fleet.transfer import Pulled, TransferClient, TransferServer, parse_address
from optkit.runtime.baked import is_compiled, layout_entry
from optkit.runtime.engine import Engine
from optkit.runtime.kv.exchange import Adoption, BlockExchange, Incoming
from optkit.runtime.kv.peers import PeerSetup
from optkit.runtime.runner import ModelRunner
from optkit.runtime.types import EngineRequest

logger = logging.getLogger(__name__)

LEAST_SECONDS = 0.1  # of a fetch: short prompts on a busy machine
LEAST_COMPUTING_SECONDS = 0.5  # for a block of a source that computes
CONNECT_SECONDS = 0.5
TAKE_OVER_SECONDS = 30.0
MAX_FETCHES = 16  # at once; further requests are queued without a fetch


@dataclass
class Counters:
    """Counters named as fields of ``EngineStats``."""

    kv_fetches: int = 0
    kv_fetch_failures: int = 0
    kv_fetch_microseconds: int = 0
    kv_bytes_fetched: int = 0
    kv_blocks_fetched: int = 0
    kv_blocks_rejected: int = 0

    def add(self, pulled: Pulled, is_timed: bool) -> None:
        """Count a fetch; with ``is_timed`` also bytes and time, for the speed of the network."""
        self.kv_fetches += 1
        self.kv_fetch_failures += bool(pulled.reason)
        if is_timed:
            self.kv_fetch_microseconds += round(1e6 * pulled.seconds)
            self.kv_bytes_fetched += pulled.num_bytes
        self.kv_blocks_fetched += pulled.num_blocks
        self.kv_blocks_rejected += pulled.num_rejected


@dataclass(eq=False)
class Fetching:
    """A request whose KV is on the way."""

    request: EngineRequest
    client: TransferClient | None = field(default=None, repr=False)


class EnginePeers:
    """The exchange of KV of ``engine`` with other engines (``optkit.runtime.kv.peers.Peers``).

    Args:
        secret: of the deployment, which begins the digests of the engine (``Engine.share_digests``).
        version: digest of the artifact.
        host, port: of the server; port 0 is any.

    Raises:
        OSError: the address can't be had.
        ValueError: the engine can't exchange blocks, for the reason of ``BlockExchange.refusal``.
    """

    def __init__(
        self, engine: Engine, secret: bytes, version: str, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self._engine, self._secret = engine, secret
        self._exchange = BlockExchange(engine)
        if self._exchange.refusal is not None:
            raise ValueError(self._exchange.refusal)
        self.layout = layout_digest(engine)
        self._identity = Identity(version, self.layout, engine.config.block_size)
        self._lock = threading.Lock()
        self._fetching: dict[str, Fetching] = {}
        self._counters = Counters()
        self._server = TransferServer(self._exchange, secret, self._identity, host, port)
        self.address = self._server.address

    def close(self) -> None:
        """End all transfers; fetches are handed back."""
        self._server.close()
        with self._lock:
            for fetching in self._fetching.values():
                if fetching.client is not None:
                    fetching.client.cancel()

    def counters(self) -> dict[str, int]:
        return {**asdict(self._counters), "kv_blocks_sent": self._server.num_sent}

    def fetch(self, request: EngineRequest, hand_back: Callable[[EngineRequest], None]) -> bool:
        source = request.source
        if source is None or source.address == self.address or not request.reads_prefix_cache:
            return False
        with self._lock:
            if len(self._fetching) >= MAX_FETCHES or request.request_id in self._fetching:
                return False
            fetching = self._fetching[request.request_id] = Fetching(request)
        threading.Thread(target=self._run, args=(fetching, hand_back), name="kv-fetch", daemon=True).start()
        return True

    def abort(self, request_id: str) -> bool:
        with self._lock:
            fetching = self._fetching.pop(request_id, None)
            if fetching is not None and fetching.client is not None:
                fetching.client.cancel()
        return fetching is not None

    def take_over(self, address: str, num_bytes: int) -> None:
        threading.Thread(
            target=self._take_over, args=(address, num_bytes), name="kv-adopt", daemon=True
        ).start()

    def _run(self, fetching: Fetching, hand_back: Callable[[EngineRequest], None]) -> None:
        """Fetch, and hand the request back unless aborted."""
        request = fetching.request
        try:
            self._pull(fetching)
        except (OSError, TransferError) as error:
            logger.warning("no KV of %s for a request: %s", request.source and request.source.address, error)
            self._count(Pulled(reason=str(error)))
        except Exception:
            logger.exception("a fetch of KV failed")
            self._count(Pulled(reason="a fault"))
        with self._lock:
            if self._fetching.get(request.request_id) is fetching:
                del self._fetching[request.request_id]
                hand_back(msgspec.structs.replace(request, source=None))

    def _pull(self, fetching: Fetching) -> None:
        request, source = fetching.request, fetching.request.source
        assert source is not None
        incoming = Incoming(self._exchange, request.cache_salt, request.prompt_ids)
        try:
            if not incoming.wanted:
                return
            client = TransferClient(
                self._exchange, source.address, self._secret, self._identity, CONNECT_SECONDS
            )
            try:
                with self._lock:
                    if self._fetching.get(request.request_id) is not fetching:
                        return
                    fetching.client = client
                pulled = client.pull(incoming, *self._terms(request, incoming))
                self._count(pulled, is_timed=not source.computes)
            finally:
                client.close()
        finally:
            incoming.close()

    def _terms(self, request: EngineRequest, incoming: Incoming) -> tuple[float, EngineRequest | None]:
        """The seconds of a fetch, and the request where the source computes the prompt."""
        missing = len(incoming.wanted) * self._exchange.block_size
        seconds = self._engine.scheduler.cost.prefill_seconds(missing, incoming.num_tokens - missing)
        if request.source is not None and request.source.computes:
            return max(seconds, LEAST_COMPUTING_SECONDS), request
        return max(seconds, LEAST_SECONDS), None

    def _take_over(self, address: str, num_bytes: int) -> None:
        adoption = Adoption(self._exchange)
        try:
            client = TransferClient(self._exchange, address, self._secret, self._identity, CONNECT_SECONDS)
            try:
                pulled = client.pull_recent(adoption, num_bytes, TAKE_OVER_SECONDS)
            finally:
                client.close()
            self._count(pulled, is_timed=True)
            logger.info("took over %d blocks of KV from %s", pulled.num_blocks, address)
        except (OSError, TransferError) as error:
            logger.warning("no KV was taken over from %s: %s", address, error)
        except Exception:
            logger.exception("taking over KV failed")
        finally:
            adoption.close()

    def _count(self, pulled: Pulled, is_timed: bool = False) -> None:
        with self._lock:
            self._counters.add(pulled, is_timed)
        if pulled.reason:
            logger.info("a fetch of KV ended after %d blocks: %s", pulled.num_blocks, pulled.reason)


def connect(engine: Engine, secret: bytes, setup: PeerSetup) -> EnginePeers | None:
    """The peers of ``engine``, whose digests begin with ``secret``; None, and a line in the log, where there are none.

    Raises:
        UserError: no secret, or no such address to listen at.
    """
    if not secret:
        raise UserError(
            "engines exchange KV by a secret of the deployment", where="peers", fix="give a cache_secret"
        )
    try:
        host, port = parse_address(setup.address)
        return EnginePeers(engine, secret, setup.version, host, port)
    except ValueError as refusal:
        logger.warning("no KV is exchanged with other replicas: %s", refusal)
        return None
    except (OSError, TransferError) as error:
        fix = "name an address of this machine, and a free port or 0"
        raise UserError(f"no KV can be served at {setup.address}: {error}", where="peers", fix=fix) from error


def layout_digest(engine: Engine) -> str:
    """A digest of all facts behind the meaning and the bits of a block."""
    from optkit.artifact.prefix import computed_here

    runner = engine.runner
    facts: dict[str, object] = {
        "windows": engine.config.kv_windows,
        "variants": engine.config.variant_limits,
        "here": computed_here(),
    }
    if isinstance(runner, ModelRunner):
        facts["layout"] = layout_entry(runner).model_dump()
        facts["compiled"] = is_compiled(runner)
        facts["device"] = runner.pools.device
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
