"""Prefill without an answer: the request for it, and the facts about pinned prefixes, as messages between processes."""

from __future__ import annotations

import msgspec

MAX_PINS = 1024  # names and lists of pins take memory and time, also where all pins share their blocks
NO_ROOM = "the pinned prefixes leave no room for this one"
PINS_IN_THE_WAY = "the prompt and max_tokens do not fit the KV cache: pinned prefixes leave room for"
TOO_MANY_PINS = f"{MAX_PINS} prefixes are pinned, and no more can be"
NOT_CACHED = "the KV of this prompt could not be kept"


class Prefill(msgspec.Struct, frozen=True, kw_only=True):
    """Makes an ``EngineRequest`` compute the KV of its prompt, at low priority, and generate nothing.

    Attributes:
        pin: name under which the prefix is pinned, in the place of an earlier pin of the name; "" leaves the KV to
            the prefix cache.
        lease: seconds after which the pin ends, unless it is renewed; None pins until it is dropped. A lease gives way
            to a pin without one.
        is_urgent: another engine waits for the KV, to answer a client. The prompt takes a turn like a prompt with an
            answer, in chunks of ``URGENT_TOKENS``: finished chunks travel while the next is computed.
    """

    pin: str = ""
    lease: float | None = None
    is_urgent: bool = False


class PinInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A pinned prefix.

    Attributes:
        cache_salt: of the requests that find the prefix; None for all requests.
        num_bytes: of the blocks; blocks of two pins count in both.
        age: seconds since the pin was made.
        expires_in: seconds until a lease ends.
    """

    name: str
    cache_salt: str | None
    num_tokens: int
    num_bytes: int
    age: float
    expires_in: float | None = None
