"""Choice jobs: a checked request with token ids becomes a job for each choice of the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from optkit.runtime.kv.rolling import RollingWindow
from optkit.runtime.specprefill.settings import SpecPrefill
from optkit.runtime.types import Constraint, EngineRequest
from optkit.serve.openai.defaults import SamplingDefaults
from optkit.serve.openai.protocol import ChatRequest, GenerationRequest
from optkit.serve.tools.message import MessageParser


@dataclass(frozen=True)
class Sender:
    """The origin of a request.

    Attributes:
        name: begins the engine's ids of the request's choices; clients may use a ``request_id`` twice.
        arrival: ``time.monotonic()``.
        tenant: name of the API key; requests of different tenants share no cached KV.
    """

    name: str
    arrival: float
    tenant: str = ""


class Prompt(NamedTuple):
    """A prompt, ready for the engine.

    Attributes:
        text: for an answer with the prompt in front.
        new_parser: makes the parser of an answer; None for plain text.
        constraint: on the answer.
        bad_words: token ids of forbidden words.
        tags: special tokens that the parser reads.
    """

    ids: tuple[int, ...]
    text: str = ""
    new_parser: Callable[[], MessageParser | None] = lambda: None
    constraint: Constraint | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    tags: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ChoiceJob:
    """A choice to generate: the engine's request, and the rules for its text.

    Attributes:
        index: of the choice.
        stops: strings at which the text ends.
        keep_stop: the text ends with the stop string.
        skip_special: special tokens have no text.
        tags: special tokens with a text even so, for the parser.
        echo: the prompt's text when the choice begins with the prompt.
        prompt_only: the request wants no token; the engine generates at least one, which is dropped.
        list_stop_token: a stop token has an entry in the logprobs, though not in the text.
        n: choices of the prompt, in the first choice, which counts the prompt in the metrics; else 0.
        parser: finds tool calls and reasoning in the text; None for plain text.
        hides_reasoning: the reasoning is left out of the answer.
    """

    index: int
    request: EngineRequest
    stops: Sequence[str] = ()
    keep_stop: bool = False
    skip_special: bool = True
    tags: frozenset[int] = frozenset()
    echo: str | None = None
    prompt_only: bool = False
    list_stop_token: bool = False
    n: int = 1
    parser: MessageParser | None = None
    hides_reasoning: bool = False


def choice_jobs(
    request: GenerationRequest,
    sender: Sender,
    prompt: Prompt,
    first: int,
    max_tokens: int,
    eos_ids: tuple[int, ...],
    defaults: SamplingDefaults,
    rolling: RollingWindow | None = None,
) -> Iterator[ChoiceJob]:
    """The jobs of a prompt, ``request.num_choices`` of them.

    Args:
        first: index of the first choice.
        max_tokens: tokens to generate; 0 scores the prompt only.
        eos_ids: end-of-sequence tokens of the model.
        defaults: for absent fields of the request.
        rolling: the tokens kept of an answer longer than the context.
    """
    n, is_chat = request.num_choices, isinstance(request, ChatRequest)
    for j in range(n):
        sampling = request.sampling(
            max(max_tokens, 1), eos_ids, j, defaults, prompt.constraint, prompt.bad_words
        )
        engine_request = EngineRequest(
            request_id=f"{sender.name}-{first + j}",
            prompt_ids=prompt.ids,
            sampling=sampling,
            arrival=sender.arrival,
            priority=request.priority or 0,
            cache_salt=f"{sender.tenant}:{request.cache_salt or ''}",
            specprefill=specprefill(request),
            rolling=rolling,
        )
        yield ChoiceJob(
            index=first + j,
            request=engine_request,
            stops=request.stop,
            keep_stop=bool(request.include_stop_str_in_output),
            skip_special=request.skip_special_tokens is not False,
            tags=prompt.tags,
            echo=prompt.text if request.echoes else None,
            prompt_only=max_tokens == 0,
            list_stop_token=not is_chat or bool(request.return_token_ids),
            n=n if j == 0 else 0,
            parser=prompt.new_parser(),
            hides_reasoning=isinstance(request, ChatRequest) and request.include_reasoning is False,
        )


def specprefill(request: GenerationRequest) -> SpecPrefill | None:
    """The choice of a request on SpecPrefill; None without one."""
    if request.specprefill is None and request.specprefill_keep_pct is None:
        return None
    return SpecPrefill(enabled=request.specprefill, keep_pct=request.specprefill_keep_pct)
