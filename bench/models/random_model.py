"""Random models of any type and size in transformers, captured, changed by passes, and served by an engine.

No checkpoint is written: the model is built from a configuration, and the engine is made as by ``optkit serve``
(``optkit.runtime.factory``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optkit.capture import boundary, capture
from optkit.graph.ir import Graph
from optkit.graph.kv_layout import KVLayout
from optkit.lowering.lower import Executable, lower
from optkit.machine.present import present_target
from optkit.machine.target import Target
from optkit.passes import load
from optkit.passes.base import PassContext
from optkit.recipe.engine_options import EngineOptions
from optkit.runtime.engine import Engine
from optkit.runtime.factory import make_engine
from optkit.runtime.scheduling.cost_model import CostModel
from optkit.runtime.sizing import scheduler_config
from optkit.runtime.types import EngineRequest, SamplingParams

ALONE = "alone"  # the id of a request without others
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
Passes = Mapping[str, Mapping[str, Any]]


def random_model(model_type: str, fields: Mapping[str, Any], attention: str) -> Any:
    """A float32 model of ``model_type`` with the weights of the type's own start, the same in each call.

    Norms and biases are moved away from 1 and 0.
    """
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](**TOKENS, **fields)
    config._attn_implementation = attention
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim <= 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def captured(model_type: str, fields: Mapping[str, Any]) -> Graph:
    """The checked graph of ``random_model``."""
    boundary.register()
    return capture(boundary.built(lambda attention: random_model(model_type, fields, attention)))


def changed(graph: Graph, passes: Passes, target: Target) -> Graph:
    """A clone of ``graph`` after ``passes``, by name with options; none needs calibration, some may find nothing."""
    clone, context = graph.clone(), PassContext(target, no_calibration)
    for name, options in passes.items():
        pass_class = load(name)
        optimization = pass_class(pass_class.Config.model_validate(dict(options)))
        plan = optimization.check(clone, context)
        if plan.sites:
            optimization.apply(clone, plan, context)
    return clone


def no_calibration(config: object) -> list[list[int]]:
    raise ValueError("a random model has no text to calibrate on")


def executable(graph: Graph) -> Executable:
    """``graph`` with the machine's kernels."""
    return lower(graph, present_target("cpu"))


def engine_of(model: Executable, layout: KVLayout | None = None, **options: Any) -> Engine:
    """An engine on ``model``.

    Args:
        layout: the groups of layers with block tables of their own; by default the model's groups.
        options: of ``optkit serve``.
    """
    config = scheduler_config(model, EngineOptions(**options), "cpu", layout)
    return make_engine(model, config, None, None, None, CostModel())


def random_prompts(count: int, length: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """``count`` prompts of ``length`` tokens; each begins with another token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocabulary, (count, length), generator=generator)
    ids[:, 0] = 3 + torch.arange(count) % (vocabulary - 3)
    return ids.tolist()


@dataclass(frozen=True)
class Timed:
    """A greedy answer: seconds to the first token, of the clock and of the thread, and tokens found in the cache."""

    tokens: list[int]
    wall: float
    cpu: float
    cached: int


def start(engine: Engine, prompt: Sequence[int], num_tokens: int) -> None:
    """Queue a request for ``num_tokens`` greedy tokens."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
    request = EngineRequest(
        request_id=ALONE, prompt_ids=tuple(prompt), sampling=sampling, arrival=time.monotonic()
    )
    engine.add_request(request)


def answer_of(engine: Engine, prompt: Sequence[int], num_tokens: int) -> Timed:
    """The answer to a request alone in the engine.

    Raises:
        RuntimeError: the request failed.
    """
    tokens: list[int] = []
    wall, cpu, cached = 0.0, 0.0, 0
    begun, used = time.perf_counter(), time.thread_time()
    start(engine, prompt, num_tokens)
    while engine.has_work:
        for output in engine.step():
            if output.error:
                raise RuntimeError(output.error)
            if output.first is not None:
                wall, cpu = time.perf_counter() - begun, time.thread_time() - used
                cached = output.first.cached_tokens
            tokens += output.token_ids
    return Timed(tokens, wall, cpu, cached)


def eager_answer(
    model_type: str, fields: Mapping[str, Any], prompt: Sequence[int], num_tokens: int
) -> list[int]:
    """The greedy answer of ``random_model`` in transformers' eager attention; no token ends the answer."""
    model = random_model(model_type, fields, "eager")
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": num_tokens, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return out[0, len(prompt) :].tolist()
