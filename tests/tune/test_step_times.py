"""Times of steps on a tiny model with real kernels."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from optkit.errors import UserError
from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.simulation.step_costs import StepShape, fit
from optkit.tune.step_times import measure_step, measure_steps, shapes, step_process
from tests.support.hostile_artifact import native_artifact
from tests.support.tiny_runtime import engine
from tests.support.tuning_lab import LIMITS


def test_shapes_cover_prompts_contexts_batches_and_both_together() -> None:
    found = shapes(LIMITS)
    assert {len(items) for items in found} >= {1, 2, 4, 8, 16, 5, 9}
    assert {items[0] for items in found if len(items) == 1} >= {(1024, 0), (512, 512), (64, 0), (1, 1024)}
    sizes = [sum(new for new, _ in items) for items in found]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(
    "limits",
    [
        {"max_num_seqs": 2, "max_num_batched_tokens": 128},
        {"max_model_len": 200},
        {"num_blocks": 20},
        {"max_model_len": 40, "num_blocks": 2, "max_num_seqs": 1},
    ],
)
def test_shapes_fit_the_limits(limits: dict[str, int]) -> None:
    config = SchedulerConfig(
        **{
            "max_num_seqs": 16,
            "max_num_batched_tokens": 2048,
            "max_model_len": 4096,
            "block_size": 32,
            "num_blocks": 1000,
        }
        | limits
    )
    found = shapes(config)
    assert found
    for items in found:
        assert len(items) <= config.max_num_seqs
        assert sum(new for new, _ in items) <= config.max_num_batched_tokens
        assert sum(-(-(new + context) // 32) for new, context in items) <= config.num_blocks


def test_steps_are_measured_through_the_runner_and_leave_no_block_behind() -> None:
    made = engine()
    used = made.stats().kv_blocks_used
    step = measure_step(made, [(5, 16), (1, 40), (1, 30)])
    assert step.shape == StepShape(7, 3, 5 * 18.5, 70) and 0 < step.seconds < 5
    found = measure_steps(made, 0.3)
    assert len({one.shape for one in found}) == len(shapes(made.config))
    assert all(one.seconds > 0 for one in found)
    assert all(before.end <= after.start for before, after in itertools.pairwise(found))
    assert made.stats().kv_blocks_used == used and not made.has_work
    assert fit(found).seconds(StepShape(64, 1, 2048.0, 0)) > 0
    with pytest.raises(ValueError, match="no room"):
        measure_step(made, [(60, 60)] * 20)
    assert made.stats().kv_blocks_used == used


def test_a_process_measures_steps_again_and_again_and_says_why_it_does_not_load(tmp_path: Path) -> None:
    artifact = native_artifact(tmp_path)
    with step_process(artifact, {}, 60.0) as measure:
        first, second = measure(), measure()
    assert {step.shape for step in first} == {step.shape for step in second}
    assert first[-1].end <= second[0].start
    with step_process(tmp_path / "none", {}, 60.0) as measure:
        with pytest.raises(UserError, match=r"calibration failed with exit code 1: .*none"):
            measure()
        with pytest.raises(
            UserError, match="calibration failed with exit code 1"
        ):  # after the end of the process, too
            measure()


def test_a_measurement_that_takes_too_long_is_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(silent))
    with (
        pytest.raises(UserError, match=r"did not end within 0 s.*--budget"),
        step_process(Path("-"), {}, 0.2) as measure,
    ):
        measure()
