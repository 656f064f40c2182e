"""Accounts of the price of guesses: a request looks for guesses, or rests.

A look costs time in two ways: wrong guesses make the step longer, and the look ends the call in which plain steps run
in sequence (``optkit.runtime.multi_step``). So each request has an account in tokens. The right guesses of a step
are earned; the time of the step beyond a plain step, in plain steps, is spent. A request with an empty account rests,
and earns ``RATE`` for each token, until the account is full enough for a look. So guesses slow an answer of n tokens
down by at most about ``START`` + ``RATE`` * n steps, whatever the text.
"""

from __future__ import annotations

import math

START = 0.5  # tokens, of a new account
MOST = 2.0  # tokens: right guesses of long ago pay for no more looks than that
RATE = 0.012  # tokens, for each token while resting
LONGEST_REST = 16  # tokens between two looks, and steps in one call
LARGEST_PRICE = 3.0  # plain steps for a look: a frozen process says nothing about guesses
SMALLEST_PRICE = -0.2
CALL_SHARE = 0.9  # until measured, and where no steps run in calls, for the price of a search
WEIGHT, LEAST_SHARE = 0.1, 0.5  # of a new share; smaller shares are noise


class Account:
    """The tokens that a request has left for looks."""

    def __init__(self) -> None:
        self.tokens = START

    @property
    def is_empty(self) -> bool:
        return self.tokens < 0

    @property
    def rest(self) -> int:
        """Tokens until the next look, at least 1 and at most ``LONGEST_REST``."""
        return max(1, min(LONGEST_REST, math.ceil(-self.tokens / RATE)))

    def earn(self, tokens: float) -> None:
        self.tokens = min(self.tokens + tokens, MOST)

    def spend(self, tokens: float) -> None:
        self.tokens -= min(max(tokens, SMALLEST_PRICE), LARGEST_PRICE)


class CallShare:
    """The time of a plain step in a call of several, as a share of a plain step alone.

    The share changes less with the machine's speed than the two times. Calls show the share while all requests rest.
    """

    def __init__(self) -> None:
        self.value = CALL_SHARE

    def observe(self, share: float) -> None:
        """Learn from a call."""
        self.value += WEIGHT * (min(max(share, LEAST_SHARE), 1.0) - self.value)
