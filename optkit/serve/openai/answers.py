"""Answers of all generating endpoints: their common facts, and the interface of their writers.

The endpoints differ in the words of requests and answers alone. Admission, prompts, generation, metrics and the end are
the same (``optkit.serve.openai.response``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from optkit.runtime.types import FirstToken
from optkit.serve.http.errors import ApiError
from optkit.serve.openai.generation import Delta
from optkit.serve.openai.logprobs import LogprobFormat


@dataclass(frozen=True)
class ResponseHead:
    """The values in all events of an answer.

    Attributes:
        fingerprint: changes with the model and the version of optkit.
    """

    reply_id: str
    created: int
    model: str
    fingerprint: str = ""


@dataclass(frozen=True)
class ResponseParts:
    """The parts of an answer beside the text.

    Attributes:
        prompts: the token ids of each prompt; the choices of a prompt follow each other.
        formats: writer of the logprobs of each choice; None without logprobs.
        show_ids: the answer has ``prompt_token_ids`` and ``token_ids``, in the places of vLLM's.
        ttft_details: the final usage has the parts of the time to first token.
        names_tool: the request names the tool to call.
        num_returned: choices of each prompt in the answer, when the rest are dropped; 0 for all.
    """

    prompts: Sequence[Sequence[int]]
    formats: Sequence[LogprobFormat | None]
    show_ids: bool = False
    ttft_details: bool = False
    names_tool: bool = False
    num_returned: int = 0

    @property
    def n(self) -> int:
        """Choices of each prompt."""
        return len(self.formats) // len(self.prompts)

    @property
    def num_prompt(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))

    def prompt_of(self, choice: int) -> Sequence[int]:
        return self.prompts[choice // (self.num_returned or self.n)]


class AnswerWriter(Protocol):
    """Writes an answer, as events or whole."""

    def chunk(self, delta: Delta) -> bytes:
        """The events for a delta."""
        ...

    def last(self) -> bytes:
        """The events at the end."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """The events for an error inside a stream, up to the end."""
        ...

    def whole(self, answers: list[Delta]) -> bytes:
        """The body of an answer without streaming."""
        ...


class Endpoint(Protocol):
    """The words of an endpoint.

    Attributes:
        operation: name in traces, of the semantic conventions for generative AI.
        prefix: begins the ids of answers.
        params: the fields of generation requests with another name here, for errors.
    """

    @property
    def operation(self) -> str: ...

    @property
    def prefix(self) -> str: ...

    @property
    def params(self) -> Mapping[str, str]: ...

    def writer(self, head: ResponseHead, parts: ResponseParts) -> AnswerWriter:
        """The writer of an answer."""
        ...


def usage(
    num_prompt: int,
    num_completion: int,
    firsts: Sequence[FirstToken | None] = (),
    n: int = 1,
    ttft_details: bool = False,
    num_reasoning: int | None = None,
    forgotten: Sequence[int | None] = (),
) -> dict[str, Any]:
    """OpenAI's ``usage`` object.

    Args:
        firsts: the engine's ``FirstToken`` of each choice; ``n`` choices share a prompt.
        ttft_details: add the parts of each choice's time to first token, in seconds.
        num_reasoning: generated tokens of the reasoning; None leaves the number out.
        forgotten: tokens that the last token of each choice did not see; None for a choice that sees all.
    """
    body: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }
    cached = cached_tokens(firsts, n)
    if cached is not None:
        body["prompt_tokens_details"] = {"cached_tokens": cached} | specprefill_details(firsts, n)
    if num_reasoning is not None:
        body["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
    body |= forgotten_details(forgotten)
    if ttft_details:
        body["ttft_details"] = firsts
    return body


def forgotten_details(forgotten: Sequence[int | None]) -> dict[str, int]:
    """The tokens that the last tokens of choices with a rolling window did not see; empty without a window."""
    known = [count for count in forgotten if count is not None]
    return {"forgotten_tokens": sum(known)} if known else {}


def specprefill_details(firsts: Sequence[FirstToken | None], n: int = 1) -> dict[str, int]:
    """The prompt tokens that SpecPrefill computed, of prompts with tokens left out; empty for none."""
    kept = [first.kept_tokens for first in firsts[::n] if first and first.kept_tokens is not None]
    return {"specprefill_kept_tokens": sum(kept)} if kept else {}


def cached_tokens(firsts: Sequence[FirstToken | None], n: int = 1) -> int | None:
    """Prompt tokens found in the prefix cache; None without a report of the engine."""
    found = [first.cached_tokens for first in firsts[::n] if first]
    return sum(found) if found else None
