"""Grammars of an engine: compiled on a thread beside the steps, kept for the next request with the same constraint.

llguidance compiles without the interpreter lock, so the steps of other requests go on; a request waits for the
grammar outside of the steps. The tables of the vocabulary are built for the first constrained request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from optkit.errors import UserError
from optkit.extras import need_extra
from optkit.runtime.structured import FEATURE
from optkit.runtime.structured.matcher import SequenceMatcher
from optkit.runtime.types import Constraint, ConstraintFailed, EngineRefusal, SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_KEPT = 64  # compiled grammars

Compiled = tuple["LLMatcher", "LLTokenizer"]


def vocabulary(tokenizer_json: Path, vocab_size: int) -> LLTokenizer:
    """``grammar.vocabulary`` of a file, behind the check of the extra.

    Raises:
        ConstraintFailed: the file is missing, or no tokenizer for llguidance.
    """
    need_extra("structured", FEATURE)
    from optkit.runtime.structured import grammar

    try:
        text = tokenizer_json.read_text(encoding="utf-8")
    except OSError as error:
        raise ConstraintFailed(f"{tokenizer_json.name} can't be read: {error.strerror}") from error
    return grammar.vocabulary(text, vocab_size)


class Grammars:
    """The grammars of an engine.

    Args:
        make_vocabulary: returns the tokens of the served model; called once, on a thread.
    """

    def __init__(self, make_vocabulary: Callable[[], LLTokenizer]) -> None:
        self._make_vocabulary = make_vocabulary
        self._compiler: _Compiler | None = None

    def matcher(self, constraint: Constraint, sampling: SamplingParams) -> SequenceMatcher:
        """The state of ``constraint`` for an answer with ``sampling``, perhaps not ready yet.

        Raises:
            EngineRefusal: llguidance is not installed.
        """
        try:
            self._compiler = self._compiler or _Compiler(self._make_vocabulary)
        except UserError as error:
            raise EngineRefusal(f"{error.what}: {error.fix}") from error
        return SequenceMatcher(self._compiler.compiled(constraint), sampling.stop_token_ids)


class _Compiler:
    """Compiles on a thread, and keeps the latest grammars."""

    def __init__(self, make_vocabulary: Callable[[], LLTokenizer]) -> None:
        need_extra("structured", FEATURE)
        self._make_vocabulary = make_vocabulary
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[Constraint, Future[Compiled]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def compiled(self, constraint: Constraint) -> Future[Compiled]:
        found = self._kept.pop(constraint, None)
        if found is None or (found.done() and found.exception()):
            found = self._thread.submit(self._compile, constraint)
        self._kept[constraint] = found
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return found

    def _compile(self, constraint: Constraint) -> Compiled:
        from optkit.runtime.structured import grammar

        if self._vocabulary is None:
            self._vocabulary = self._make_vocabulary()
        return grammar.compiled(constraint, self._vocabulary), self._vocabulary
