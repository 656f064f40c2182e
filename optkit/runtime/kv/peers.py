"""Other engines as sources of KV, as seen by an engine: the order in a request, and the interface of the transfer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from optkit.runtime.types import EngineRequest


class KVSource(msgspec.Struct, frozen=True, kw_only=True):
    """An engine with KV for the beginning of a prompt, to be fetched before the request is queued.

    Attributes:
        address: host and port of the engine's transfer server.
        computes: the source computes the prompt first, and gives each block once published.
    """

    address: str
    computes: bool = False


class PeerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The place of an engine among engines with an exchange of KV.

    Attributes:
        address: host and port to listen at; port 0 is any. Other engines reach this one at the host.
        version: digest of the artifact.
        factory: ``module:function``, called in the engine process as ``function(engine, secret, setup)``; returns the
            ``Peers`` of the engine, or None where no exchange is possible.
    """

    address: str = "127.0.0.1:0"
    version: str = ""
    factory: str = "optkit.fleet.peers:connect"


class Peers(Protocol):
    """The exchange of KV with other engines, by threads beside the loop of the engine.

    Attributes:
        address: host and port of the own transfer server.
        layout: digest of the meaning of the bytes of a block.
    """

    address: str
    layout: str

    def fetch(self, request: EngineRequest, hand_back: Callable[[EngineRequest], None]) -> bool:
        """Fetch KV for ``request`` from the source; ``hand_back`` gets the request afterwards, without the source.

        False where the request is to be queued at once.
        """
        ...

    def abort(self, request_id: str) -> bool:
        """Give up a fetch, whose request is not handed back; False for an unknown request."""
        ...

    def take_over(self, address: str, num_bytes: int) -> None:
        """Fetch the most recently used blocks of a leaving engine, up to ``num_bytes`` of KV."""
        ...

    def counters(self) -> dict[str, int]:
        """Counters, named as fields of ``EngineStats``."""
        ...

    def close(self) -> None:
        """End all transfers."""
        ...
