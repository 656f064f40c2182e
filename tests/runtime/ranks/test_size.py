"""The number of ranks of an engine: from the option, else from the artifact, refused before anything is loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from optkit.errors import UserError
from optkit.graph.ir import GraphMeta
from optkit.graph.states import KVSpec
from optkit.recipe.engine_options import EngineOptions
from optkit.runtime.ranks.size import Sharing, for_each_rank, sharing


def artifact(
    noted: int | None = None, heads: int = 3, target: str = "cpu", kind: str = "tensor_parallel"
) -> Any:
    """Facts of an artifact of two layers; an access to its weights is an error."""
    meta = GraphMeta("llama", 10, 10, (KVSpec(0, heads, 8, 8), KVSpec(1, heads, 8, 8)), "", "")
    entries = [SimpleNamespace(name=kind)] if noted else []
    return SimpleNamespace(
        directory="shared/",
        recipe=SimpleNamespace(entries=entries, target=target),
        annotations=lambda: {kind: noted} if noted else {},
        meta=lambda: meta,
    )


def test_the_option_goes_before_the_artifact() -> None:
    assert sharing(artifact(), EngineOptions()).size == 1
    assert sharing(artifact(3), EngineOptions()).size == 3
    assert sharing(artifact(3), EngineOptions(tensor_parallel_size=1)).size == 1
    assert sharing(artifact(), EngineOptions(tensor_parallel_size=3)).size == 3


def test_a_pass_that_was_rolled_back_asks_for_nothing() -> None:
    given = artifact(3)
    given.annotations = dict
    assert sharing(given, EngineOptions()).size == 1


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (
            artifact(),
            {"tensor_parallel_size": 2},
            "--tensor-parallel-size: 2 ranks can't share 3 KV heads.*work: 1, 3",
        ),
        (artifact(2), {}, "shared/: 2 ranks can't share 3 KV heads"),
        (
            artifact(target="cuda"),
            {"tensor_parallel_size": 3},
            "served on CPUs alone. --tensor-parallel-size 1",
        ),
        (artifact(3), {"kv_offload_bytes": 5}, "--kv-offload-bytes: ranks do not offload KV"),
        (
            artifact(),
            {"pipeline_parallel_size": 3},
            "--pipeline-parallel-size: 3 stages need .* the model has 2. use at most 2",
        ),
        (
            artifact(3),
            {"pipeline_parallel_size": 2},
            "--pipeline-parallel-size: .*can't be combined. --tensor-parallel-size 1, or --pipeline-parallel-size 1",
        ),
    ],
)
def test_what_ranks_cannot_do_is_refused(given: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        sharing(given, EngineOptions(**options))


def test_a_rank_has_its_part_of_the_kv_and_the_threads_that_were_asked_for() -> None:
    options = for_each_rank(EngineOptions(kv_cache_bytes=900, threads=4), Sharing(3))
    assert (options.kv_cache_bytes, options.threads) == (300, 4)
    assert for_each_rank(EngineOptions(), Sharing(4096)).threads == 1


def test_stages_are_asked_for_as_shares_are() -> None:
    assert sharing(artifact(), EngineOptions(pipeline_parallel_size=2)) == Sharing(2, "pipeline_parallel")
    noted = artifact(2, kind="pipeline_parallel")
    assert sharing(noted, EngineOptions()) == Sharing(2, "pipeline_parallel")
    assert sharing(noted, EngineOptions(pipeline_parallel_size=1)).size == 1
    assert sharing(artifact(3), EngineOptions(tensor_parallel_size=1, pipeline_parallel_size=2)).by_layers


def test_a_stage_has_all_cores_and_the_kv_is_sized_whole() -> None:
    options = for_each_rank(EngineOptions(kv_cache_bytes=900, threads=4), Sharing(3, "pipeline_parallel"))
    assert (options.kv_cache_bytes, options.threads) == (900, 4)
