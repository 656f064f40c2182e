"""Whole HTTP answers by key, least recently used first, within a bound on memory.

Answers in progress count, too: each has a ``Room``, at the cost of kept answers.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

Header = tuple[bytes, bytes]
OVERHEAD = 512  # bytes of an entry beside body and headers, about
MAX_SHARE = 4  # an answer above this part of the bound is not kept: it would push out too many
IN_PROGRESS = 2  # part of the bound for all answers in progress


class Answer(NamedTuple):
    """An answer with status 200.

    Attributes:
        stored: time of the clock.
        expires: time of the clock; None never.
    """

    headers: tuple[Header, ...]
    body: bytes
    stored: float
    expires: float | None = None

    @property
    def num_bytes(self) -> int:
        return OVERHEAD + len(self.body) + sum(len(name) + len(value) for name, value in self.headers)


class ResponseStore:
    """Answers of at most ``max_bytes`` together.

    Attributes:
        num_bytes: memory of kept answers and of answers in progress.
        num_evictions: kept answers dropped for new answers.
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes, self.clock = max_bytes, clock
        self.num_bytes = self.num_evictions = 0
        self._num_reserved = 0
        self._answers: OrderedDict[bytes, Answer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: bytes) -> Answer | None:
        """The answer of ``key``, unless expired."""
        answer = self._answers.get(key)
        if answer is None:
            return None
        if answer.expires is not None and answer.expires <= self.clock():
            self.remove(key)
            return None
        self._answers.move_to_end(key)
        return answer

    def put(self, key: bytes, headers: tuple[Header, ...], body: bytes, ttl: float | None) -> None:
        """Keep an answer, in the place of an older answer, for ``ttl`` seconds at most."""
        now = self.clock()
        answer = Answer(headers, body, now, None if ttl is None else now + ttl)
        self.remove(key)
        if answer.num_bytes * MAX_SHARE > self.max_bytes:
            return
        self._answers[key] = answer
        self.num_bytes += answer.num_bytes
        self._make_room()

    def remove(self, key: bytes) -> None:
        """Forget the answer of ``key``, if any."""
        answer = self._answers.pop(key, None)
        if answer is not None:
            self.num_bytes -= answer.num_bytes

    def clear(self) -> None:
        """Forget all kept answers."""
        for key in list(self._answers):
            self.remove(key)

    def reserve(self, size: int) -> bool:
        """Take ``size`` bytes for answers in progress, or give back; False if too many are taken."""
        if size > 0 and (self._num_reserved + size) * IN_PROGRESS > self.max_bytes:
            return False
        self._num_reserved += size
        self.num_bytes += size
        self._make_room()
        return True

    def _make_room(self) -> None:
        while self.num_bytes > self.max_bytes and self._answers:
            self.num_bytes -= self._answers.popitem(last=False)[1].num_bytes
            self.num_evictions += 1


class Room:
    """The memory of an answer in progress, taken from ``store``."""

    def __init__(self, store: ResponseStore) -> None:
        self._store, self._size = store, 0

    def grow(self, size: int) -> bool:
        """Take ``size`` bytes more; False if the answer, or all in progress, would be too large."""
        is_small = (self._size + size) * MAX_SHARE <= self._store.max_bytes
        if not (is_small and self._store.reserve(size)):
            return False
        self._size += size
        return True

    def close(self) -> None:
        """Give the memory back."""
        self._store.reserve(-self._size)
        self._size = 0
