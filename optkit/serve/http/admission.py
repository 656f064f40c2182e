"""Admission: a bounded number of choices in the server, and 429 beyond the bound.

A queue without a bound turns overload into timeouts for all clients. Here a request takes a permit per choice
before any work is done, also before tokenization, and keeps the permits until the last byte is sent. Without enough
permits the answer is 429 at once, with the time after which to come back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from optkit.serve.http.errors import ApiError

RETRY_SECONDS = 1


class Admission:
    """``capacity`` permits, given out without waiting. Single-threaded: used by a single event loop.

    Args:
        on_rejection: called for each request refused for lack of permits.
    """

    def __init__(self, capacity: int, on_rejection: Callable[[], object] = lambda: None) -> None:
        self.capacity, self.used = capacity, 0
        self._on_rejection = on_rejection

    def check(self) -> None:
        """Raise the 429 of ``permits`` if none is free: an overloaded server need not read refused requests."""
        if self.used >= self.capacity:
            self._on_rejection()
            raise at_capacity()

    @contextmanager
    def permits(self, count: int) -> Iterator[None]:
        """Hold ``count`` permits for the body.

        Raises:
            ApiError: 400 if ``count`` exceeds the capacity, 429 if too few permits are free.
        """
        if count > self.capacity:
            raise ApiError(
                f"at most {self.capacity} prompts fit this server", param="prompt", code="too_many_prompts"
            )
        if self.used + count > self.capacity:
            self._on_rejection()
            raise at_capacity()
        self.used += count
        try:
            yield
        finally:
            self.used -= count


def at_capacity() -> ApiError:
    """The answer without a free permit."""
    message = "the server is at capacity; try again later"
    return ApiError(message, code="rate_limit_exceeded", status=429, retry_after=RETRY_SECONDS)
