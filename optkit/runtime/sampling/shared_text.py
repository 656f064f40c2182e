"""Sources of guesses from earlier requests: answers, and the likely tokens of logits.

Only requests of the same ``cache_salt`` share sources, because the speed of an answer tells what the sources hold. The
API process makes salts of tenants, so tenants share nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from optkit.runtime.sampling.occurrences import END, Occurrences
from optkit.runtime.sampling.recycling import Recycled

CACHED_TOKENS = 1 << 16  # of earlier answers, twice as many at most, some 26 MB
MOST_SALTS = 4  # the salts used last keep their text, and those of requests under way


class EarlierAnswers:
    """The newest answers of other requests, in two texts: when the first is full the second is forgotten.

    Args:
        most: number of answers to keep.
    """

    def __init__(self, most: int) -> None:
        self.most, self.texts, self._count = most, (Occurrences(), Occurrences()), 0

    def add(self, answer: Sequence[int]) -> None:
        if self.most < 1:
            return
        if 2 * self._count >= self.most or 2 * len(self.texts[0].ids) >= CACHED_TOKENS:
            self.texts, self._count = (Occurrences(), self.texts[0]), 0
        self.texts[0].extend([END, *answer[-(CACHED_TOKENS // 2) :]])
        self._count += 1


class SharedText:
    """The sources of the requests of a salt.

    Args:
        max_cached_requests: number of answers to keep.
    """

    def __init__(self, max_cached_requests: int) -> None:
        self.earlier, self.recycled = EarlierAnswers(max_cached_requests), Recycled()


class SharedTexts:
    """The sources of the requests of each salt.

    Args:
        max_cached_requests: number of answers to keep of each salt.
    """

    def __init__(self, max_cached_requests: int) -> None:
        self.max_cached_requests = max_cached_requests
        self._by_salt: dict[str, SharedText] = {}  # the salt used last is last

    def of(self, salt: str) -> SharedText:
        """The sources for ``salt``. The least recently used salt of too many is forgotten."""
        found = self._by_salt.pop(salt, None)
        while found is None and len(self._by_salt) >= MOST_SALTS:
            del self._by_salt[next(iter(self._by_salt))]
        self._by_salt[salt] = found or SharedText(self.max_cached_requests)
        return self._by_salt[salt]
