"""Models for questions about long documents: plain transformers, the runtime, a server.

An answer is scored token by token, each token after the true tokens before. Questions of a document are independent:
the KV of a question is not seen by the next question.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from optkit.evaluation.long.document import Document, Question
from optkit.evaluation.served import TOKEN_ID, ScoringServer
from optkit.runtime.logits import LONG_CHUNK, RuntimeLogits

UNLIMITED = 1 << 20  # tokens of a model without a table of positions


@dataclass(frozen=True)
class Answered:
    """Scores of an answer of A tokens by a model.

    Attributes:
        logprobs: log probabilities of the true tokens, float64 [A], in nats.
        right: True where the true token is the most likely one, [A].
        rows: logits [A, V], or None where a server keeps them.
    """

    logprobs: Tensor
    right: Tensor
    rows: Tensor | None = None

    @staticmethod
    def of(rows: Tensor, answer: Sequence[int]) -> Answered:
        """Scores from the logits [A, V] before each token of the answer.

        Raises:
            FloatingPointError: a logit is NaN.
        """
        rows, wanted = rows.float().cpu(), torch.tensor(answer)
        if rows.isnan().any():
            raise FloatingPointError("the logits of an answer are NaN")
        logprobs = rows.log_softmax(-1).gather(-1, wanted[:, None])[:, 0].double()
        return Answered(logprobs, rows.argmax(-1) == wanted, rows)


@runtime_checkable
class AnswerSource(Protocol):
    """A model for questions about documents."""

    def answers(self, document: Document) -> list[Answered]:
        """An answer to each question, in order."""
        ...


@runtime_checkable
class RowSource(Protocol):
    """A model with logits at some positions of a long window."""

    def rows(self, window: Sequence[int], positions: Sequence[int]) -> Tensor:
        """float32 logits [len(positions), V] at ascending ``positions``."""
        ...


class ModuleAnswers:
    """A transformers model. The cache of a document's context is copied for each question."""

    def __init__(self, module: Any) -> None:
        self.module = module

    @torch.inference_mode()
    def answers(self, document: Document) -> list[Answered]:
        cache = self._cache(document.context)
        return [self._answer(document, question, cache) for question in document.questions]

    @torch.inference_mode()
    def rows(self, window: Sequence[int], positions: Sequence[int]) -> Tensor:
        wanted = torch.tensor(list(positions))
        output = self.module(torch.tensor([list(window)]), use_cache=False, logits_to_keep=wanted)
        rows: Tensor = output.logits[0].float()
        return rows

    def _cache(self, context: Sequence[int]) -> Any:
        """The cache of a context; None for an empty one, or for a model with layers that keep no keys of tokens."""
        cache = None
        for start in range(0, len(context), LONG_CHUNK):
            part = torch.tensor([context[start : start + LONG_CHUNK]])
            output = self.module(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = getattr(output, "past_key_values", None)
            layers = getattr(cache, "layers", ())
            if not layers or not all(hasattr(layer, "get_seq_length") for layer in layers):
                return None
        return cache

    def _answer(self, document: Document, question: Question, cache: Any) -> Answered:
        tokens = question.prompt + question.answer[:-1]
        if cache is None:
            tokens = document.context + tokens
        kept = len(question.answer)
        output = self.module(
            torch.tensor([tokens]),
            past_key_values=copy.deepcopy(cache),
            use_cache=cache is not None,
            logits_to_keep=kept,
        )
        return Answered.of(output.logits[0, -kept:], question.answer)


class RuntimeAnswers:
    """An executable in the steps of a server: chunked prefill of the context, then the answer in single steps."""

    def __init__(self, logits: RuntimeLogits) -> None:
        self.logits = logits

    def answers(self, document: Document) -> list[Answered]:
        branches = [
            (question.prompt + question.answer[:-1], len(question.answer)) for question in document.questions
        ]
        found = self.logits.branches(document.context, branches)
        pairs = zip(found, document.questions, strict=True)
        return [Answered.of(rows, question.answer) for rows, question in pairs]

    def rows(self, window: Sequence[int], positions: Sequence[int]) -> Tensor:
        return self.logits.rows(window, positions)


def answer_source(logits: Any) -> AnswerSource:
    """The answers of an opened model: ``ModuleLogits`` or ``RuntimeLogits``."""
    return RuntimeAnswers(logits) if isinstance(logits, RuntimeLogits) else ModuleAnswers(logits.module)


def context_of(logits: Any) -> int:
    """Tokens of the longest context of an opened model."""
    if isinstance(logits, RuntimeLogits):
        return logits.max_length
    return int(getattr(logits.module.config.get_text_config(), "max_position_embeddings", None) or UNLIMITED)


class ServedAnswers:
    """A server with log probabilities of prompts. A question is a request: context, question and answer.

    The server computes the whole as a prompt: decode steps take no part.
    """

    def __init__(self, server: ScoringServer, decode: Callable[[int], str]) -> None:
        self.server, self.decode = server, decode

    def answers(self, document: Document) -> list[Answered]:
        return [self._answer(document.context, question) for question in document.questions]

    def _answer(self, context: Sequence[int], question: Question) -> Answered:
        count = len(question.answer)
        scored = self.server.score([*context, *question.prompt, *question.answer])
        right = []
        for token, top in zip(question.answer, scored.top[-count:], strict=True):
            best = max(top, key=lambda text: top[text]) if top else ""
            right.append(best in (f"{TOKEN_ID}{token}", self.decode(token)))
        return Answered(scored.logprobs[-count:], torch.tensor(right))
