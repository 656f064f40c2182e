"""The scorer of an artifact: its layers, the engine's options, and models and engines that can't."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from optkit.errors import UserError
from optkit.graph.ir import Graph
from optkit.graph.variants import SharedWeights
from optkit.lowering.lower import Executable, lower
from optkit.recipe.engine_options import EngineOptions
from optkit.runtime.scheduling.scheduler import SchedulerConfig
from optkit.runtime.specprefill.load import check_choices, scoring_queue
from tests.support.graphs import captured
from tests.support.target import TARGET

CONFIG = SchedulerConfig(
    max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128, block_size=8, num_blocks=64
)


def artifact(name: str, **overrides: Any) -> Any:
    def executable(shared: SharedWeights, change: Callable[[Graph], Graph]) -> Executable:
        return lower(change(captured(name, **overrides)), TARGET, shared=shared)

    return SimpleNamespace(executable=executable, check_present=lambda: None)


@pytest.mark.parametrize(("asked", "wanted"), [(None, 2), (3, 3)])
def test_the_scorer_has_a_quarter_of_the_layers_or_as_many_as_asked(asked: int | None, wanted: int) -> None:
    options = EngineOptions(specprefill_layers=asked, specprefill_threshold=99, specprefill_keep_pct=0.5)
    queue = scoring_queue(artifact("llama", num_hidden_layers=6), SharedWeights, options, CONFIG)
    assert (queue.options.enabled, queue.options.threshold, queue.options.keep_pct) == (False, 99, 0.5)
    assert len(queue.scorer().layers) == wanted and queue.scorer().max_tokens == 64


def test_a_server_with_specprefill_does_not_start_where_it_is_not_possible() -> None:
    on = EngineOptions(specprefill=True)
    with pytest.raises(UserError, match="windows"):
        scoring_queue(artifact("gemma2"), SharedWeights, on, CONFIG)
    with pytest.raises(UserError, match="this engine can't leave tokens"):
        scoring_queue(artifact("llama"), None, on, CONFIG)
    assert scoring_queue(artifact("llama"), SharedWeights, on, CONFIG).options.enabled
    scoring_queue(artifact("gemma2"), SharedWeights, EngineOptions(), CONFIG)  # asked for by no one


def test_a_window_and_specprefill_for_all_requests_are_refused() -> None:
    with pytest.raises(UserError, match="a rolling window reads prompts whole"):
        check_choices(EngineOptions(specprefill=True, rolling_window=32))
    check_choices(EngineOptions(specprefill=True))
    check_choices(EngineOptions(rolling_window=32))
