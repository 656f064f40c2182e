"""The deltas of a request: of each choice, or with beams of all choices of a prompt."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from optkit.serve.engine_api import TokenSource
from optkit.serve.openai.beams import beam_text
from optkit.serve.openai.generation import Delta, Observer, generate_text, merge
from optkit.serve.openai.jobs import ChoiceJob
from optkit.serve.openai.protocol import GenerationRequest, first_given
from optkit.text.tokenizer import Tokenizer


def deltas_of(
    request: GenerationRequest,
    jobs: Sequence[ChoiceJob],
    engine: TokenSource,
    tokenizer: Tokenizer,
    metrics: Observer,
) -> AsyncGenerator[Delta, None]:
    """The deltas of all ``jobs`` of ``request`` on arrival.

    Raises:
        ApiError: as ``generate_text``.
    """
    if not request.use_beam_search:
        return merge([generate_text(engine, tokenizer, metrics, job) for job in jobs])
    n, penalty = request.num_choices, first_given(request.length_penalty, 1.0)
    prompts = [jobs[at : at + n] for at in range(0, len(jobs), n)]
    return merge([beam_text(engine, tokenizer, metrics, found, penalty) for found in prompts])
