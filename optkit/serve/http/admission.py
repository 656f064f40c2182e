"""A bounded number of sequences in the server, with an answer for those beyond it.

A queue without a bound turns overload into timeouts for everybody. Here a request takes one permit per prompt
before any work is done for it (also before tokenization), and keeps them until its last byte is sent; when
there are not enough, the answer is 429 at once, with the time after which to come back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from optkit.serve.http.errors import ApiError

RETRY_SECONDS = 1


class Admission:
    """``capacity`` permits, handed out without waiting. Single-threaded: one event loop uses it.

    ``on_rejection`` is called for each request that is turned away for lack of permits.
    """

    def __init__(self, capacity: int, on_rejection: Callable[[], object] = lambda: None) -> None:
        self.capacity, self.used = capacity, 0
        self._on_rejection = on_rejection

    def check(self) -> None:
        """Raise the 429 of ``permits`` if not even one is free: an overloaded server need not read what it refuses."""
        if self.used >= self.capacity:
            self._on_rejection()
            raise at_capacity()

    @contextmanager
    def permits(self, count: int) -> Iterator[None]:
        """Hold ``count`` permits for the body.

        Raises:
            ApiError: 400 if they could never be had, 429 if they cannot be had now.
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
    """The answer to those beyond the bound."""
    message = "the server is at capacity; try again later"
    return ApiError(message, code="rate_limit_exceeded", status=429, retry_after=RETRY_SECONDS)
