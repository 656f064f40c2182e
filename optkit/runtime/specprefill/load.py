"""The scorer of an artifact, over the packed weights of the engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from optkit.artifact.open import Artifact
from optkit.errors import UserError
from optkit.recipe.engine_options import ONE_OF_TWO
from optkit.runtime.specprefill.queue import ScoringQueue, SpecPrefillOptions

if TYPE_CHECKING:
    from optkit.graph.ir import Graph
    from optkit.graph.variants import SharedWeights
    from optkit.recipe.engine_options import EngineOptions
    from optkit.runtime.scheduling.config import SchedulerConfig
    from optkit.runtime.specprefill.graph import ScoredLayer
    from optkit.runtime.specprefill.scorer import PromptScorer


def check_choices(options: EngineOptions) -> None:
    """Refuse options of which one undoes the other.

    Raises:
        UserError: SpecPrefill and a rolling window, both for requests without a choice.
    """
    if options.specprefill and options.rolling_window:
        raise UserError(
            ONE_OF_TWO,
            where="--specprefill, --rolling-window",
            fix="give one of the two; a request may choose either by its fields",
        )


def scoring_queue(
    artifact: Artifact,
    shared: Callable[[], SharedWeights] | None,
    options: EngineOptions,
    config: SchedulerConfig,
) -> ScoringQueue:
    """The queue of prompts to score; without ``shared``, which gives packed weights, every prompt is whole.

    Raises:
        UserError: ``options`` ask for SpecPrefill, and the model or the engine can't leave tokens out.
    """
    make: Callable[[], PromptScorer] | None = None
    if shared is not None:
        make = partial(make_scorer, artifact, shared, options.specprefill_layers, config)
    defaults = SpecPrefillOptions(
        options.specprefill, options.specprefill_keep_pct, options.specprefill_threshold
    )
    queue = ScoringQueue(make, defaults)
    if options.specprefill:
        queue.prepare()
    return queue


def make_scorer(
    artifact: Artifact, shared: Callable[[], SharedWeights], num_layers: int | None, config: SchedulerConfig
) -> PromptScorer:
    """The first ``num_layers`` layers of an artifact, by default a quarter.

    Raises:
        UserError: tokens of a prompt can't be left out with the model, or the artifact has changed.
    """
    from optkit.runtime.specprefill.graph import default_layers, num_attention_layers, scoring_graph
    from optkit.runtime.specprefill.scorer import PromptScorer

    artifact.check_present()
    layers: list[ScoredLayer] = []

    def first_layers(graph: Graph) -> Graph:
        count = default_layers(num_attention_layers(graph)) if num_layers is None else num_layers
        scoring, found = scoring_graph(graph, count)
        layers.extend(found)
        return scoring

    model = artifact.executable(shared=shared(), change=first_layers)
    return PromptScorer(model, layers, config.block_size, config.max_num_batched_tokens)
