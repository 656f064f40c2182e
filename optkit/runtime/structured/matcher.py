"""The state of a constraint along the answer of a request.

The state is a function of the answer's tokens alone. A ``SequenceMatcher`` keeps the tokens behind the state, and each
call names the answer so far: the state goes back to the common beginning and on from there. So wrong drafts,
preemption and repeated steps need no bookkeeping, and a lost state is built again from the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from optkit.runtime.types import ConstraintFailed

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LEFT = "the answer is none that the constraint allows"
TOO_COMPLEX = "the constraint is too complex"


class SequenceMatcher:
    """Implements ``optkit.runtime.types.Matcher`` by llguidance.

    Args:
        compiled: the matcher before the first token, and its vocabulary.
        stop_ids: tokens that end the answer, allowed where the constraint is fulfilled.
    """

    def __init__(self, compiled: Future[tuple[LLMatcher, LLTokenizer]], stop_ids: Sequence[int]) -> None:
        self._compiled, self._stop_ids = compiled, stop_ids
        self._state: LLMatcher | None = None
        self._known: list[int] = []  # the tokens behind the state
        self._bits = np.zeros(0, dtype=np.uint32)

    @property
    def is_ready(self) -> bool:
        """The grammar is compiled, or compiling has failed."""
        return self._compiled.done()

    def wait(self, timeout: float) -> None:
        """Return when ready, or after ``timeout`` seconds."""
        try:
            self._compiled.exception(timeout)
        except TimeoutError:
            return

    def allowed(self, output: Sequence[int]) -> np.ndarray:
        """The tokens that may follow ``output``, a bit each, [ceil(vocabulary / 32)] uint32; valid until the next call.

        Raises:
            ConstraintFailed: no token may follow, or the mask takes too long.
        """
        state = self._follow(output)
        state.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if state.is_error():
            raise ConstraintFailed(TOO_COMPLEX)
        _, tokens = self._compiled.result()
        self._set(tokens.eos_tokens, False)  # llguidance's guess at the ends
        if state.is_accepting():
            self._set(self._stop_ids, True)
        return self._bits

    def forced(self, output: Sequence[int]) -> list[int]:
        """The tokens after ``output`` without an alternative."""
        return self._follow(output).compute_ff_tokens()

    def num_valid(self, output: Sequence[int], draft: Sequence[int]) -> int:
        """The number of tokens at the beginning of ``draft`` that may follow ``output``."""
        return self._follow(output).validate_tokens(list(draft)) if draft else 0

    def is_complete(self, output: Sequence[int]) -> bool:
        """True when ``output`` fulfils the constraint and nothing may follow."""
        state = self._follow(output)
        return state.is_stopped() and state.is_accepting()

    def _set(self, tokens: Sequence[int], allow: bool) -> None:
        for token in tokens:
            word, bit = token // 32, np.uint32(1 << token % 32)
            if word < len(self._bits):
                self._bits[word] = self._bits[word] | bit if allow else self._bits[word] & ~bit

    def _follow(self, output: Sequence[int]) -> LLMatcher:
        """The state after ``output``."""
        known, output = self._known, list(output)
        same = len(known) if output[: len(known)] == known else _common(known, output)
        if self._state is None or (same < len(known) and not self._state.rollback(len(known) - same)):
            self._state, same = self._fresh(), 0
        self._known = output
        if same < len(output) and not self._state.consume_tokens(output[same:]):
            self._state, self._known = None, []
            raise ConstraintFailed(LEFT)
        return self._state

    def _fresh(self) -> LLMatcher:
        try:
            matcher, tokens = self._compiled.result()
        except Exception as error:
            raise ConstraintFailed(str(error)) from error
        self._bits = np.zeros(-(-tokens.vocab_size // 32), dtype=np.uint32)
        return matcher.deep_copy()


def _common(first: list[int], second: list[int]) -> int:
    """The length of the common beginning."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
