"""Recordings: bounded, without effect on tokens, and gone afterwards."""

from __future__ import annotations

import time

import pytest
import torch

from optkit.errors import UserError
from optkit.kernels.cpu import native
from optkit.lowering.lower import lower
from optkit.profiling.observer import NoObserver, Work
from optkit.profiling.recording import DECODE, PREFILL, Recording, phase_of
from tests.support.graphs import captured
from tests.support.recorded import GREEDY, PROMPT_TOKENS, prompt, recorded_engine
from tests.support.tiny_runtime import engine, int8_llama

needs_native = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))


def test_a_new_engine_has_no_observer_and_nothing_is_timed() -> None:
    made = engine()
    assert isinstance(made.observer, NoObserver) and not made.observer.is_on
    assert [type(variant).__name__ for variant in int8_llama().variants] == ["LoweredVariant"]


@needs_native
def test_tokens_are_the_same_and_the_steps_are_bounded() -> None:
    prompts = [prompt(number) for number in range(5)]
    wanted = [engine(enable_prefix_caching=False).generate([p], GREEDY) for p in prompts]
    plain = int8_llama().variants
    made, recording = recorded_engine(steps=2)
    assert [made.generate([p], GREEDY) for p in prompts] == wanted
    assert int8_llama().variants is plain and not recording.is_on
    result = recording.result()
    assert [step.phase for step in result.steps].count(PREFILL) == 2
    assert [step.phase for step in result.steps].count(DECODE) == 2 and result.num_lost == 0
    prefill = next(step for step in result.steps if step.phase == PREFILL)
    assert prefill.work == (Work(PROMPT_TOKENS, PROMPT_TOKENS),)
    contexts = [step.work[0].context for step in result.steps if step.phase == DECODE]
    assert contexts == [PROMPT_TOKENS + 1, PROMPT_TOKENS + 2]


@needs_native
def test_steps_are_as_long_as_by_a_clock_around_them() -> None:
    made, recording = recorded_engine(steps=3)
    outer = []
    step = made.step

    def timed() -> list[object]:
        start = time.perf_counter()
        outputs = step()
        outer.append(time.perf_counter() - start)
        return outputs

    made.step = timed  # type: ignore[method-assign]
    for number in range(3):
        made.generate([prompt(number)], GREEDY)
    inner = [each.seconds for each in recording.result().steps]
    assert len(inner) == 6 and all(seconds <= max(outer) for seconds in inner)
    matched = [min(outer, key=lambda seconds, mine=mine: abs(seconds - mine)) for mine in inner]
    assert inner == pytest.approx(matched, abs=2e-4)


@needs_native
def test_a_recording_that_is_closed_within_a_step_leaves_the_model_plain() -> None:
    made, recording = recorded_engine()
    plain = recording.plain
    recording.begin()
    recording.scheduled([Work(4, 4)])
    assert recording.model.variants is recording.timed
    recording.close()
    assert recording.model.variants is plain
    recording.end()
    assert recording.result().steps == ()
    assert made.generate([prompt(0)], GREEDY)


@needs_native
def test_steps_without_room_are_counted_and_left_out() -> None:
    made, recording = recorded_engine(steps=2)
    assert recording.timing.recorder is not None
    recording.timing.recorder.records = recording.timing.recorder.records[:50]
    made.generate([prompt(0)], GREEDY)
    made.generate([prompt(1)], GREEDY)
    result = recording.result()
    assert result.num_lost > 0 and result.num_lost + len(result.steps) == 4


def test_ops_of_a_model_without_programs_are_recorded_from_python() -> None:
    model = lower(captured("llama"))
    recording = Recording(model, 64, 1)
    runner = engine().runner
    assert recording.timing.recorder is None
    from optkit.runtime.engine import Engine
    from optkit.runtime.runner import ModelRunner

    config = engine(enable_prefix_caching=False).config
    made = Engine(ModelRunner(model, runner.num_blocks, runner.block_size), config)
    made.observer = recording
    wanted = engine_tokens(made)
    assert wanted == engine_tokens(Engine(ModelRunner(model, runner.num_blocks, runner.block_size), config))
    steps = recording.result().steps
    names = {recording.timing.ops[call.op].node for call in steps[0].calls}
    nodes = {node.name for node in model.module.graph.nodes if node.op == "call_function"}
    untimed = {node.name for node in model.module.graph.nodes if "getitem" in node.name}
    assert names == nodes - untimed


def engine_tokens(made: object) -> list[list[int]]:
    return made.generate([prompt(3)], GREEDY)  # type: ignore[attr-defined]


@pytest.mark.parametrize("steps", [0, -1, 101])
def test_numbers_of_steps_out_of_range_are_refused(steps: int) -> None:
    with pytest.raises(UserError, match="steps can't be recorded"):
        Recording(lower(captured("llama")), 64, steps)


def test_models_on_a_gpu_are_refused() -> None:
    model = lower(captured("llama"))
    model.device = torch.device("cuda")
    with pytest.raises(UserError, match="CPUs alone"):
        Recording(model, 64)


@pytest.mark.parametrize(
    ("work", "phase"),
    [
        ([Work(1, 9)], DECODE),
        ([Work(1, 9), Work(1, 30)], DECODE),
        ([Work(4, 20, 3)], DECODE),
        ([Work(1, 1)], PREFILL),  # the only token of a prompt
        ([Work(8, 8)], PREFILL),
        ([Work(1, 9), Work(16, 48)], PREFILL),
    ],
)
def test_a_step_with_a_part_of_a_prompt_is_a_prefill(work: list[Work], phase: str) -> None:
    assert phase_of(work) == phase
