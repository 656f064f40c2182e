"""Speed on a GPU is that of captured steps: every step that is timed is a replay, prompts in chunks too."""

from __future__ import annotations

import pytest
import torch

from bench.gpu.model import TINY, build, captured
from optkit.evaluation.speed import interleaved, step_function
from optkit.graph.shapes import Point
from optkit.machine.target import get_target
from optkit.recipe.load import parse_recipe
from optkit.runtime.cuda.device import CudaDevice
from optkit.runtime.cuda.runner import GraphRunner
from tests.gpu_rehearsal.machine import rehearsal

RECIPE = parse_recipe(
    "schema_version: 1\nname: small\ntarget: cuda-h200\npasses: {}\n"
    "runtime: {block_size: 8, max_num_batched_tokens: 16}"
)


@pytest.mark.parametrize("point", [Point(16, 1, 16), Point(40, 1, 40), Point(33, 1, 33), Point(3, 3, 20)])
def test_timed_steps_are_replays(point: Point, monkeypatch: pytest.MonkeyPatch) -> None:
    captured(TINY)  # torch.export asks a driver for the state of its generators, if there is a GPU
    runners = []
    made = GraphRunner.__init__
    monkeypatch.setattr(
        GraphRunner, "__init__", lambda self, *a, **options: made(self, *a, **options) or runners.append(self)
    )
    with rehearsal("meta"):
        model = build(TINY, "fp8", get_target("cuda-h200"), CudaDevice().torch_device, torch.bfloat16)
        step = step_function(model, point, RECIPE)
        captures = runners[0].num_captures
        assert len(interleaved([step])[0]) == 3
    (runner,) = runners
    assert runner.num_captures == captures > 0 and runner.num_eager == 0 and runner.num_replays > 0
