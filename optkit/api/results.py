"""Results of a loaded model: answers, pieces of answers, scored text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class TokenScore:
    """A token with the natural logarithm of the probability, by the model's own distribution.

    Attributes:
        text: of the token; bytes without a whole character read ``bytes:\\xe2``.
        logprob: None for the first token of a text, which nothing precedes.
        top: the likeliest tokens at the position, as (token id, text, logprob).
    """

    token_id: int
    text: str
    logprob: float | None
    top: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool in an answer; ``arguments`` are JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Choice:
    """An answer to a prompt.

    Attributes:
        text: of the answer, without the reasoning and the calls of a chat answer.
        token_ids: generated tokens; a stop token is the last.
        finish_reason: ``stop``, ``length`` or ``tool_calls``.
        logprobs: of ``token_ids`` where asked for, else empty.
        reasoning: of a chat answer, if the model's template marks reasoning.
        tool_calls: of a chat answer to a request with ``tools``.
    """

    text: str
    token_ids: tuple[int, ...] = field(repr=False)
    finish_reason: str
    logprobs: tuple[TokenScore, ...] = field(default=(), repr=False)
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Completion:
    """The answers to a prompt; ``str`` gives the text of the first.

    Attributes:
        prompt: the text of the prompt; of messages, the rendered text. Empty for a prompt of token ids.
        cached_tokens: prompt tokens whose KV was in the prefix cache.
        ttft_seconds: time to the first token, from the call on.
        kept_tokens: prompt tokens that SpecPrefill computed, of all; None for a prompt computed whole.
        forgotten_tokens: tokens that the last token of each choice did not see, with a rolling window.
    """

    prompt: str
    prompt_token_ids: tuple[int, ...] = field(repr=False)
    choices: tuple[Choice, ...]
    cached_tokens: int = 0
    ttft_seconds: float = 0.0
    kept_tokens: int | None = None
    forgotten_tokens: int = 0

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the first choice."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        """The end of the first choice: ``stop``, ``length`` or ``tool_calls``."""
        return self.choices[0].finish_reason

    @property
    def reasoning(self) -> str:
        """The reasoning of the first choice."""
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls of tools in the first choice."""
        return self.choices[0].tool_calls

    @property
    def logprobs(self) -> tuple[TokenScore, ...]:
        """The scores of the first choice."""
        return self.choices[0].logprobs

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return Completions([self])._repr_html_()


class Completions(list[Completion]):
    """Completions in the order of their prompts, with a table in notebooks."""

    def _repr_html_(self) -> str:
        from optkit.api.html import html_table

        header = ("prompt", "answer", "tokens", "end")
        rows = [
            (completion.prompt, choice.text, str(len(choice.token_ids)), choice.finish_reason)
            for completion in self
            for choice in completion.choices
        ]
        return html_table(header, rows)


@dataclass(frozen=True)
class TextPiece:
    """A part of an answer during generation; ``str`` gives the text.

    Attributes:
        choice: index of the answer, for ``n`` above 1.
        finish_reason: in the last piece of an answer, else None.
        tool_calls: all calls of the answer, in the last piece.
    """

    text: str
    token_ids: tuple[int, ...]
    choice: int = 0
    finish_reason: str | None = None
    logprobs: tuple[TokenScore, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class ScoredText:
    """A text with the log probability of each token."""

    text: str
    tokens: tuple[TokenScore, ...]

    @property
    def values(self) -> list[float]:
        """The log probabilities, without the first token, which nothing precedes."""
        return [token.logprob for token in self.tokens if token.logprob is not None]

    @property
    def total(self) -> float:
        """The sum of the log probabilities, in nats."""
        return math.fsum(self.values)

    @property
    def mean(self) -> float:
        """The mean log probability of a token, in nats; NaN for a text of a single token."""
        return self.total / len(self.values) if self.values else math.nan

    @property
    def perplexity(self) -> float:
        """exp(-mean)."""
        return math.exp(-self.mean)

    def _repr_html_(self) -> str:
        from optkit.api.html import fragment, html_table

        rows = [
            (token.text, "" if token.logprob is None else f"{token.logprob:.3f}") for token in self.tokens
        ]
        title = f"{len(self.tokens)} tokens, {self.total:.3f} nats, perplexity {self.perplexity:.3f}"
        return fragment(title, [html_table(("token", "log probability"), rows)])


@dataclass(frozen=True, eq=False)
class Embeddings:
    """Vectors of texts; ``numpy.asarray`` gives ``vectors``.

    Attributes:
        vectors: [texts, hidden size] float32.
        num_tokens: of each text.
        pooling: ``last``, ``mean`` or ``cls``.
    """

    vectors: np.ndarray
    num_tokens: tuple[int, ...]
    pooling: str

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.vectors[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.vectors, dtype=dtype, copy=copy) if copy else np.asarray(self.vectors, dtype)

    def similarity(self, other: Embeddings | None = None) -> np.ndarray:
        """Cosines [texts, texts of ``other``] float32; without ``other`` of the texts with each other."""
        first, second = (normalized(one.vectors) for one in (self, other or self))
        return first @ second.T

    def _repr_html_(self) -> str:
        from optkit.api.html import fragment

        return fragment(f"{len(self)} vectors of {self.vectors.shape[1]} numbers, {self.pooling} pooling", ())


def normalized(vectors: np.ndarray) -> np.ndarray:
    """``vectors`` [n, size] with length 1; a vector of zeros stays."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    return (vectors / np.where(lengths == 0, 1, lengths)).astype(np.float32)


def single(found: Sequence[Completion], is_single: bool) -> Completion | Completions:
    """The only completion, or all."""
    return found[0] if is_single else Completions(found)
