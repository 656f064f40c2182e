"""Whole HTTP answers by key, least recently used first, within a bound on memory."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

Header = tuple[bytes, bytes]
OVERHEAD = 512  # bytes of an entry beside body and headers, about
MAX_SHARE = 4  # an answer above this part of the bound is not kept: it would push out too many


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
    """Answers of at most ``max_bytes`` together."""

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes, self.clock = max_bytes, clock
        self.num_bytes = self.num_evictions = 0
        self._answers: OrderedDict[bytes, Answer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: bytes) -> Answer | None:
        """The answer of ``key``, if it has not expired."""
        answer = self._answers.get(key)
        if answer is None:
            return None
        if answer.expires is not None and answer.expires <= self.clock():
            self.remove(key)
            return None
        self._answers.move_to_end(key)
        return answer

    def put(self, key: bytes, headers: tuple[Header, ...], body: bytes, ttl: float | None) -> None:
        """Keep an answer, in the place of an older one, for ``ttl`` seconds at most."""
        now = self.clock()
        answer = Answer(headers, body, now, None if ttl is None else now + ttl)
        self.remove(key)
        if answer.num_bytes * MAX_SHARE > self.max_bytes:
            return
        self._answers[key] = answer
        self.num_bytes += answer.num_bytes
        while self.num_bytes > self.max_bytes:
            self.num_bytes -= self._answers.popitem(last=False)[1].num_bytes
            self.num_evictions += 1

    def remove(self, key: bytes) -> None:
        """Forget the answer of ``key``, if there is one."""
        answer = self._answers.pop(key, None)
        if answer is not None:
            self.num_bytes -= answer.num_bytes
