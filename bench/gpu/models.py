"""Whole models: time to first token and per output token, on the device alone and in total.

``*_ms`` are device times: replays of captured graphs, timed by events as for a kernel. ``wall_*_ms`` are a caller's
times: scheduling, copying, sampling and reading the token included. Transformers is measured in wall time.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu.model import ModelShape, build, prompt, sampler
from bench.gpu.timing import replays

BLOCK = 32
AGREEMENT = 0.05  # of logits, relative to the largest: 16-bit numbers, rounded in other places


@dataclass(frozen=True)
class Points:
    """Prompt lengths to prefill, the decode context, and output tokens of the wall clock's decode."""

    prompts: tuple[int, ...] = (512, 2048)
    context: int = 512
    outputs: int = 65
    rounds: int = 15
    wall_rounds: int = 5

    @property
    def longest(self) -> int:
        return max(*self.prompts, self.context) + self.outputs + BLOCK


TINY_POINTS = Points((4, 8), 4, 3, rounds=2, wall_rounds=2)


def measure(
    shape: ModelShape, scheme: str, points: Points, target: Any, gpu: Any, dtype: torch.dtype
) -> dict[str, Any]:
    """Figures of a model; see the module's docstring."""
    from optkit.evaluation.speed import sequence
    from optkit.runtime.cuda.buckets import Buckets
    from optkit.runtime.cuda.layout import StepShape
    from optkit.runtime.cuda.runner import GraphRunner
    from optkit.runtime.overlap import OverlapEngine
    from optkit.runtime.scheduling.scheduler import SchedulerConfig
    from optkit.runtime.types import Batch, SamplingParams, ScheduledRequest

    start = time.perf_counter()
    model = build(shape, scheme, target, gpu.torch_device, dtype)
    row: dict[str, Any] = {"build_seconds": time.perf_counter() - start, "weight_bytes": model.weight_bytes}
    blocks = -(-points.longest // BLOCK)
    largest = StepShape(max(points.prompts), 1, blocks)
    runner = GraphRunner(model, blocks, BLOCK, gpu, largest, sampler(target, gpu.torch_device))
    start = time.perf_counter()
    runner.capture(Buckets((1,), tuple(sorted(points.prompts)), 1, blocks))
    row["capture_seconds"] = time.perf_counter() - start

    def step(length: int, computed: int) -> Batch:
        seq = sequence(0, length, computed, blocks, shape.vocabulary)
        return Batch((ScheduledRequest(seq, length - computed),))

    for length in points.prompts:
        row |= milliseconds(f"ttft_{length}", replays(runner.prepared(step(length, 0)), points.rounds))
    decode = runner.prepared(step(points.context + 1, points.context))
    row |= milliseconds("tpot", replays(decode, points.rounds))
    config = SchedulerConfig(
        max_num_seqs=1, max_num_batched_tokens=max(points.prompts), max_model_len=blocks * BLOCK,
        block_size=BLOCK, num_blocks=blocks, enable_prefix_caching=False,
    )  # fmt: skip
    engine = OverlapEngine(runner, config)

    def generate(length: int, outputs: int) -> None:
        engine.generate(
            [prompt(length, shape.vocabulary)], SamplingParams(max_tokens=outputs, temperature=0.0)
        )

    row |= wall_clock(generate, points, shape)
    row["kernels"] = sorted(
        {f"{re.sub(r'_[0-9]+$', '', name)}: {kernel}" for name, kernel in model.kernels.items()}
    )
    return row | {"graph_captures": runner.num_captures, "eager_steps": runner.num_eager}


def agreement(
    shape: ModelShape, scheme: str, target: Any, gpu: Any, dtype: torch.dtype, points: Points | None = None
) -> dict[str, Any]:
    """Logits of captured steps against the reference of every op, on the same weights.

    The steps are a prompt smaller than its bucket, a following chunk, and a following token.
    """
    from bench.gpu.kernels import error
    from bench.gpu.model import by_reference, filled
    from optkit.evaluation.speed import sequence
    from optkit.lowering.lower import lower
    from optkit.runtime.cuda.buckets import Buckets
    from optkit.runtime.cuda.layout import StepShape
    from optkit.runtime.cuda.runner import GraphRunner
    from optkit.runtime.runner import ModelRunner
    from optkit.runtime.types import Batch, ScheduledRequest

    points = points or Points()
    graph = filled(shape, scheme, target, gpu.torch_device, dtype)
    spec = graph.clone()
    by_reference(spec)
    model, exact = (lower(g, target, device=gpu.torch_device, dtype=dtype) for g in (graph, spec))
    blocks = -(-points.longest // BLOCK)
    runner = GraphRunner(
        model,
        blocks,
        BLOCK,
        gpu,
        StepShape(max(points.prompts), 1, blocks),
        sampler(target, gpu.torch_device),
    )
    runner.capture(Buckets((1,), tuple(sorted(points.prompts)), 1, blocks))
    plain = ModelRunner(exact, blocks, BLOCK, gpu.torch_device)
    first = min(points.prompts) - 1
    worst = 0.0
    for done, length in ((0, first), (first, 2 * first), (2 * first, 2 * first + 1)):
        seq = sequence(0, length, done, blocks, shape.vocabulary)
        batch = Batch((ScheduledRequest(seq, length - done),))
        worst = max(worst, error(runner.execute(batch), plain.execute(batch)))
    row = {"relative_error": worst, "tolerance": AGREEMENT, "ok": worst <= AGREEMENT}
    return row if row["ok"] else row | {"error": f"logits differ by {worst:.3g}, {AGREEMENT:g} is allowed"}


def wall_clock(generate: Callable[[int, int], None], points: Points, shape: ModelShape) -> dict[str, Any]:
    """Wall times of ``generate(prompt tokens, output tokens)``."""
    row: dict[str, Any] = {}
    for length in points.prompts:
        row |= milliseconds(
            f"wall_ttft_{length}", waited(lambda n=length: generate(n, 1), points.wall_rounds)
        )
    one = statistics.median(waited(lambda: generate(points.context, 1), points.wall_rounds))
    many = statistics.median(waited(lambda: generate(points.context, points.outputs), points.wall_rounds))
    return row | {"wall_tpot_ms": (many - one) / (points.outputs - 1) * 1e3}


def waited(call: Callable[[], None], rounds: int) -> list[float]:
    """Seconds of ``call``, after an uncounted call."""
    call()
    samples = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return samples


def milliseconds(name: str, samples: list[float]) -> dict[str, Any]:
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return {f"{name}_ms": median * 1e3, f"{name}_quartiles_ms": [q1 * 1e3, q3 * 1e3]}


def transformers_baseline(
    shape: ModelShape, points: Points, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """The same by ``generate`` of Transformers with a static cache, which compiles the decode step on a GPU."""
    import transformers
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config(), dtype=dtype)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0)
        for name, buffer in model.named_buffers():
            half = buffer.shape[0]
            if name.endswith("inv_freq"):
                buffer.copy_(10000.0 ** -(torch.arange(half, device=device) / half))
    model.eval()

    @torch.inference_mode()
    def generate(length: int, outputs: int) -> None:
        ids = torch.tensor([prompt(length, shape.vocabulary)], device=device)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=outputs,
            min_new_tokens=outputs, cache_implementation="static", pad_token_id=0,
        )  # fmt: skip
        out.cpu()

    row = wall_clock(generate, points, shape)
    return row | {"transformers": transformers.__version__}
