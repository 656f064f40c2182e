"""A profile of an artifact in this process: a prefill and decodes through the engine, several times each.

The engine is the one that serves, with scheduler, KV cache and sampler; prompts are arbitrary tokens. Other than in
serving, the prefix cache and speculation are off, and a prompt is one step: with chunks the steps would differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from optkit.artifact.open import Artifact
from optkit.errors import UserError
from optkit.machine.present import present_target
from optkit.machine.target import usable_cores
from optkit.profiling.observer import NoObserver
from optkit.profiling.recording import Recorded, Recording
from optkit.profiling.report import Report, make_report
from optkit.recipe.engine_options import EngineOptions, engine_options
from optkit.runtime.engine import Engine
from optkit.runtime.factory import load_engine
from optkit.runtime.runner import ModelRunner
from optkit.runtime.types import SamplingParams

WARM_UPS = 2  # unrecorded prefills, each with two decode steps


def profile(
    directory: Path | str,
    prompt_tokens: int = 512,
    context: int = 512,
    steps: int = 3,
    sequences: int = 1,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """The report of a prefill of ``prompt_tokens``, and of a decode of ``sequences`` after ``context`` tokens each.

    Raises:
        UserError: not an artifact, one for a GPU, more tokens than the model takes, or more sequences than the engine.
    """
    artifact = Artifact.open(directory)
    target = present_target(artifact.recipe.target, where=str(directory))
    if target.kind != "cpu":
        fix = "optkit serve --profile-dir records steps with torch's profiler"
        raise UserError("ops are recorded on CPUs alone", where=str(directory), fix=fix)
    progress("loading")
    options = options_for(artifact, prompt_tokens)
    torch.set_num_threads(options.threads or usable_cores())
    engine = load_engine(str(directory), options)
    check_lengths(engine, prompt_tokens, context, steps)
    check_places(engine, sequences)
    progress("measuring")
    recorded = record(engine, prompt_tokens, context, steps, sequences)
    progress("comparing with the roofs")
    return make_report(artifact.name, recorded, artifact.graph(), target)


def options_for(artifact: Artifact, prompt_tokens: int) -> EngineOptions:
    """The engine's options by the recipe, with room for the prompt in a step."""
    own = engine_options(artifact.recipe)
    budget = max(own.max_num_batched_tokens, prompt_tokens)
    given = {"enable_prefix_caching": False, "speculative_model": "none", "max_num_batched_tokens": budget}
    return engine_options(artifact.recipe, given)


def check_lengths(engine: Engine, prompt_tokens: int, context: int, steps: int) -> None:
    """Refuse prompts that do not fit the model's context.

    Raises:
        UserError: too long, or empty.
    """
    most = engine.config.max_model_len
    for name, tokens in (("--prompt-tokens", prompt_tokens + 3), ("--context", context + steps + 3)):
        if tokens > most:
            fix = "give fewer, or more KV cache in the recipe"
            raise UserError(f"{tokens} tokens of prompt and answer, of up to {most}", where=name, fix=fix)


def check_places(engine: Engine, sequences: int) -> None:
    """Refuse more sequences than the recipe has places for.

    Raises:
        UserError: more than ``max_num_seqs``.
    """
    most = engine.config.max_num_seqs
    if sequences > most:
        fix = "give fewer, or more runtime.max_num_seqs in the recipe"
        raise UserError(f"{sequences} sequences, of up to {most} in a step", where="--sequences", fix=fix)


def record(engine: Engine, prompt_tokens: int, context: int, steps: int, sequences: int = 1) -> Recorded:
    """Records of ``steps`` prefills, and of ``steps`` decode steps of ``sequences``.

    Raises:
        UserError: steps out of range, or the sequences never decode at once.
    """
    runner = engine.runner
    if not isinstance(runner, ModelRunner):
        raise TypeError("the engine has no model in this process")
    for number in range(WARM_UPS):
        generate(engine, prompt_tokens, number, answer=3)
    most_tokens = engine.config.max_num_batched_tokens
    recording = Recording(runner.model, most_tokens, steps, sequences)  # type: ignore[arg-type]
    engine.observer = recording
    try:
        for number in range(steps):
            generate(engine, prompt_tokens, WARM_UPS + number)
        answer = steps + 1 + prefill_steps(engine, context, sequences)
        generate(
            engine, context, WARM_UPS + steps, min(answer, engine.config.max_model_len - context), sequences
        )
        if recording.is_on:
            fix = "give fewer, a shorter --context, or more KV cache in the recipe"
            what = f"{sequences} sequences after {context} tokens each don't decode at once for {steps} steps"
            raise UserError(what, where="--sequences", fix=fix)
        return recording.result()
    finally:
        engine.observer = NoObserver()
        recording.close()


def prefill_steps(engine: Engine, context: int, sequences: int) -> int:
    """Steps, at most, in which the first of ``sequences`` decodes while prompts of ``context`` tokens are computed.

    A step has room for a chunk beside the tokens of the sequences that decode, and may end with a prompt.
    """
    room = max(1, engine.config.max_num_batched_tokens - sequences)
    return (sequences - 1) * -(-context // room)


def generate(engine: Engine, tokens: int, number: int, answer: int = 1, sequences: int = 1) -> float:
    """Run ``sequences`` prompts of ``tokens`` arbitrary tokens, other ones for each ``number``; seconds."""
    size = engine.runner.vocab_size
    prompts = [
        [((7 + 13 * place + 17 * (number + 31 * each)) % 1000 + 3) % size for place in range(tokens)]
        for each in range(sequences)
    ]
    start = time.perf_counter()
    engine.generate(prompts, SamplingParams(max_tokens=answer, temperature=0.0))
    return time.perf_counter() - start
