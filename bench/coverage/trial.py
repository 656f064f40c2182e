"""The trial of a model type: capture a tiny model, and compare the graph with eager attention, densely and served.

Logits of the graph must agree to ``TOLERANCE`` with a second model, with the same weights, in transformers' eager
attention:

- a prompt of 61 tokens, longer than every window and chunk, in one call;
- prompts of 61, 29, 7 and 41 tokens in ragged batches over paged KV, in uneven chunks, then token by token.

Then an engine serves the four prompts in steps of 24 tokens, with too few KV blocks for all, and preempts a request
every few steps. Each token must have the largest eager logit after the tokens before, up to
``TOLERANCE``.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bench.coverage.models import tiny_model
from optkit.capture import boundary, capture
from optkit.errors import UnsupportedModel, UserError, first_line
from optkit.graph.kv_layout import kv_layout
from optkit.graph.states import recurrent_of
from optkit.graph.verify import VerifyError, verify
from optkit.lowering.dense import dense_inputs
from optkit.lowering.lower import Executable, lower
from optkit.runtime.engine import Engine
from optkit.runtime.logits import RuntimeLogits
from optkit.runtime.runner import ModelRunner
from optkit.runtime.scheduling.scheduler import SchedulerConfig
from optkit.runtime.types import SamplingParams, TokenOutput

TOLERANCE = 1e-4  # of the largest logit, of 1 where it is smaller
LENGTHS = (61, 29, 7, 41)
NEW_TOKENS = 12
SEQUENCES = len(LENGTHS)
RIGHT, WRONG, REFUSED = "right", "wrong", "refused"


@dataclass
class Outcome:
    """The outcome for a type: ``state`` is right, wrong or refused, ``reason`` a line, empty where right.

    Seconds are CPU time of one thread, the same on a busy machine.
    """

    state: str
    reason: str = ""
    capture_seconds: float = 0.0
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        times = {"capture_seconds": round(self.capture_seconds, 1), "seconds": round(self.seconds, 1)}
        return asdict(self) | times


class Wrong(Exception):
    """The graph computes other logits than the model."""


def trial(name: str) -> Outcome:
    """Capture, compare and serve a tiny model of type ``name``."""
    torch.set_num_threads(1)
    outcome, started = Outcome(REFUSED), time.process_time()
    try:
        attempt(name, outcome)
        outcome.state = RIGHT
    except (UnsupportedModel, UserError) as error:
        outcome.reason = error.what
    except (Wrong, VerifyError) as error:
        outcome.state, outcome.reason = WRONG, first_line(error, 300)
    except Exception as error:  # noqa: BLE001 - transformers and torch raise any type
        outcome.reason = f"{type(error).__name__}: {first_line(error, 300)}"
    outcome.seconds = time.process_time() - started
    return outcome


def attempt(name: str, outcome: Outcome) -> None:
    boundary.register()
    model = boundary.built(lambda attention: tiny_model(name, attention))
    started = time.process_time()
    try:
        graph = capture(model)
    finally:
        outcome.capture_seconds = time.process_time() - started
    verify(graph)
    executable, eager = lower(graph), Eager(tiny_model(name, "eager"))
    prompts = [ids(length, graph.meta.vocab_size) for length in LENGTHS]
    expected = [eager.logits(prompt) for prompt in prompts]
    first = dense_inputs([LENGTHS[0]], prompts[0], executable.states)
    compare("in one call", executable(first), expected[0])
    runtime = RuntimeLogits(executable, block_size=4, chunk=19, decode=5)
    for given, right in zip(runtime.logits([p.tolist() for p in prompts]), expected, strict=True):
        compare("in ragged batches", given, right)
    serve(executable, eager, prompts)


class Eager:
    """The model in transformers' eager attention and loop over experts."""

    def __init__(self, model: Any) -> None:
        self.model = model
        for module in model.modules():
            config = getattr(module, "config", None)
            if hasattr(config, "_experts_implementation"):
                config._experts_implementation = "eager"

    def logits(self, prompt: Tensor) -> Tensor:
        """Logits [T, V] after each token of a prompt."""
        with torch.no_grad():
            return self.model(input_ids=prompt[None], use_cache=False).logits[0]


class PreemptingEngine(Engine):
    """An engine with a preemption of the last of several running requests in every third step."""

    num_steps = 0

    def step(self) -> list[TokenOutput]:
        self.num_steps += 1
        if self.num_steps % 3 == 0 and len(self.scheduler.running) > 1:
            self.scheduler.preempt(self.scheduler.running[-1])
        return super().step()


def serve(executable: Executable, eager: Eager, prompts: list[Tensor]) -> None:
    """Compare greedy answers of an engine with the eager logits.

    Raises:
        Wrong: a token is not the most likely token.
    """
    slots = SEQUENCES if recurrent_of(executable.states) else 0
    layout = kv_layout(executable.states)
    config = SchedulerConfig(
        max_num_seqs=SEQUENCES, max_num_batched_tokens=24, max_model_len=128, block_size=8,
        num_blocks=14 * len(layout.groups), num_state_slots=slots, num_checkpoints=slots, kv_windows=layout.windows,
    )  # fmt: skip
    runner = ModelRunner(executable, config.num_blocks, config.block_size, num_slots=2 * slots, layout=layout)
    engine = PreemptingEngine(runner, config)
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    answers = engine.generate([prompt.tolist() for prompt in prompts], sampling)
    if not engine.stats().num_preemptions:
        raise RuntimeError("no request was preempted, so the trial shows less than it says")
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = eager.logits(torch.cat([prompt, torch.tensor(answer)]))[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        compare("served, with preemption", chosen, logits.amax(dim=1))


def compare(case: str, given: Tensor, right: Tensor) -> None:
    error, largest = (given - right).abs().max().item(), max(1.0, right.abs().max().item())
    if not error <= TOLERANCE * largest:
        raise Wrong(f"logits differ by {error:.1e} of {largest:.1e} {case}")


def ids(length: int, vocabulary: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, min(vocabulary, 128), (length,), generator=generator)
