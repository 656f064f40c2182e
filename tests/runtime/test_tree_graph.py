"""Models that take trees of guesses: which do, and the same tokens as without guesses."""

from __future__ import annotations

from typing import Any

import pytest

from optkit.graph.verify import verify
from optkit.lowering.compiled.plan import PLAN
from optkit.lowering.lower import lower
from optkit.runtime.draft_tree import DraftTree
from optkit.runtime.engine import Engine
from optkit.runtime.runner import ModelRunner
from optkit.runtime.scheduling.scheduler import SchedulerConfig
from optkit.runtime.tree_graph import TreeGraph, with_positions
from optkit.runtime.types import SamplingParams
from tests.runtime.sampling.test_tree_speculator import Priced
from tests.support import tiny_runtime
from tests.support.graphs import captured
from tests.support.speculation import Untimed, needs_native
from tests.support.target import TARGET


def test_a_graph_with_positions_is_a_graph() -> None:
    graph = tiny_runtime.int8_graph()
    found = with_positions(graph)
    verify(found)
    assert sum("positions" in str(node.args) for node in found.fx.nodes) > sum(
        "positions" in str(node.args) for node in graph.fx.nodes
    )


@needs_native
def test_reasons_are_given() -> None:
    trees = TreeGraph(TARGET)
    graph = tiny_runtime.int8_graph()
    assert trees(graph) is not graph and not trees.reason
    plain = captured("llama")
    assert trees(plain) is plain and "flash_attention" in trees.reason
    compiled = graph.clone()
    compiled.annotations[PLAN] = {}
    assert trees(compiled) is compiled and "compiled" in trees.reason


class Watched(ModelRunner):
    """Counts trees and moves."""

    num_trees = num_moves = 0

    def execute(self, batch: Any) -> Any:
        self.num_trees += sum(isinstance(item.draft, DraftTree) for item in batch.items)
        return super().execute(batch)

    def move_tokens(self, moves: Any) -> None:
        self.num_moves += len(moves)
        super().move_tokens(moves)


@needs_native
@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_a_model_says_the_same_with_trees(temperature: float) -> None:
    """Also with penalties, with a full pool and for prompts that share a prefix, twice: moved KV is read by others."""
    some = [prompt[:60] for prompt in tiny_runtime.prompts(12, stems=3)]
    sampling = [
        SamplingParams(max_tokens=40, temperature=temperature, seed=i, repetition_penalty=1.0 + 0.1 * (i % 2))
        for i in range(len(some))
    ]
    plain = tiny_runtime.engine().generate(some, sampling)
    config = SchedulerConfig(**tiny_runtime.LIMITS | {"num_blocks": 60})
    model = lower(with_positions(tiny_runtime.int8_graph()), TARGET)
    runner = Watched(model, config.num_blocks, config.block_size)
    speculator = Untimed(Priced(0.001), 12, recycles=True, max_cached_requests=8)
    engine = Engine(runner, config, None, speculator)
    assert engine.generate(some, sampling) == plain
    longer = [prompt + answer[:20] for prompt, answer in zip(some, plain, strict=True)]
    again = [SamplingParams(max_tokens=10, temperature=0.0)] * len(some)
    assert engine.generate(longer, again) == tiny_runtime.engine().generate(longer, again)
    assert runner.num_trees > 20 and runner.num_moves > 5
    assert engine.stats().kv_blocks_used == 0
    engine.scheduler.check()
