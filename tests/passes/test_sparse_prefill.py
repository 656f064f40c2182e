"""sparse_prefill: which layers, the loss, what the report says, and prompts in chunks, cached, and in int8."""

from __future__ import annotations

import pytest

from optkit.graph.ir import Graph
from optkit.graph.serialize import annotations_from_json, graph_from_json, graph_to_json
from optkit.graph.shapes import Point
from optkit.graph.verify import verify
from optkit.kernels.cpu import native
from optkit.kernels.cpu.attention import sparse_tiles
from optkit.lowering.cost import SPARSE_DENSITY, predict_seconds
from optkit.lowering.lower import lower
from optkit.machine.target import DATASHEETS
from optkit.passes.base import PassContext
from optkit.passes.sparse_prefill import SparsePrefill, SparsePrefillConfig
from optkit.runtime.engine import Engine
from optkit.runtime.runner import ModelRunner
from optkit.runtime.scheduling.scheduler import SchedulerConfig
from optkit.runtime.types import SamplingParams
from tests.support.graphs import CONTEXT, apply, captured, checked, dense, random_ids, reasons, relative_error
from tests.support.target import TARGET

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))

OPTIONS = {"cover": 0.7, "min_tokens": 64, "measure_tokens": 0}


LENGTH = 640  # of the longest prompt: ten blocks
LONG = {"max_position_embeddings": 1024}


def plain(name: str = "llama") -> Graph:
    return captured(name, **LONG | ({"n_positions": 1024} if name == "gpt2" else {}))


def sparse(name: str = "llama", *, int8: bool = False, **options: object) -> Graph:
    graph = plain(name)
    apply(graph, "flash_attention")
    if int8:
        apply(graph, "kv_int8")
    apply(graph, "sparse_prefill", **OPTIONS | options)
    return graph


@pytest.mark.parametrize("name", ["llama", "gpt2", "deepseek_v3"])
def test_all_layers_change_and_lose_a_little(name: str) -> None:
    graph = sparse(name)
    verify(graph)
    (ids,) = random_ids([LENGTH])
    before = sparse_tiles()
    found, exact = dense(graph, ids, TARGET), dense(plain(name), ids)
    read, seen = (after - first for after, first in zip(sparse_tiles(), before, strict=True))
    assert 0 < read < 0.95 * seen
    assert 1e-3 < relative_error(found[192:], exact[192:]) < 0.7
    assert relative_error(found[:192], exact[:192]) < 1e-4  # three blocks: the first, its own, the one before
    assert relative_error(found, dense(graph, ids)) < 1e-3  # the reference reads the same blocks


def test_layers_with_a_window_stay() -> None:
    plan = checked(captured("gemma2"), "sparse_prefill", **OPTIONS)[1]
    assert len(plan.sites) == 1 and reasons(plan) == {"its window or chunks limit the keys already"}
    assert reasons(checked(captured("bloom"), "sparse_prefill", **OPTIONS)[1]) == {
        "the estimate knows no ALiBi"
    }
    assert reasons(checked(sparse(), "sparse_prefill", **OPTIONS)[1]) == {"it is sparse already"}
    short = checked(captured("llama"), "sparse_prefill")[1]
    assert reasons(short) == {"min_tokens is not below the context of 256"}


def test_gpus_have_no_kernel() -> None:
    target = next(target for target in DATASHEETS.values() if target.kind == "cuda")
    plan = SparsePrefill(SparsePrefillConfig(**OPTIONS)).check(captured("llama"), PassContext(target))
    assert not plan.sites and "no kernel for block-sparse prefill" in next(iter(reasons(plan)))


def test_the_report_has_density_and_predicted_gain() -> None:
    graph = plain()
    optimization, plan = checked(graph, "sparse_prefill", cover=0.7, min_tokens=64, measure_tokens=32)
    assert "density" not in optimization.apply(graph, plan, CONTEXT).stats  # too short to be sparse
    long = PassContext(TARGET, lambda config: [random_ids([config.length])[0].tolist()])
    graph = plain()
    optimization, plan = checked(graph, "sparse_prefill", cover=0.7, min_tokens=64, measure_tokens=LENGTH)
    stats = optimization.apply(graph, plan, long).stats
    assert 0.3 < stats["density"] < 0.95 and stats["density_tokens"] == LENGTH
    assert stats["predicted_gain_1024"] >= 1.0 and "predicted_gain_4096" not in stats
    assert graph.annotations[SPARSE_DENSITY] == pytest.approx(stats["density"], abs=1e-4)
    assert annotations_from_json(graph_to_json(graph)) == graph.annotations


def test_predictions_know_the_density() -> None:
    graph, whole_graph = sparse(), plain()
    point = Point(4096, 1, 4096)
    graph.annotations[SPARSE_DENSITY] = 0.3
    whole, part = (predict_seconds(each, point, TARGET) for each in (whole_graph, graph))
    graph.annotations[SPARSE_DENSITY] = 1.0
    assert part < 0.8 * whole and predict_seconds(graph, point, TARGET) == pytest.approx(whole)
    decode = Point(1, 1, 4096)
    graph.annotations[SPARSE_DENSITY] = 0.3
    assert predict_seconds(graph, decode, TARGET) == pytest.approx(
        predict_seconds(whole_graph, decode, TARGET)
    )


def test_the_choice_survives_the_file() -> None:
    graph = sparse()
    again = graph_from_json(graph_to_json(graph), lambda name, origin, dtype: graph.weights[name].value)
    (ids,) = random_ids([LENGTH])
    assert relative_error(dense(again, ids, TARGET), dense(graph, ids, TARGET)) == 0


def answers(model: object, prompts: list[list[int]], **limits: int) -> list[list[int]]:
    config = SchedulerConfig(
        **{
            "max_num_seqs": 4,
            "max_num_batched_tokens": 1024,
            "max_model_len": 1024,
            "block_size": 16,
            "num_blocks": 128,
        }
        | limits
    )
    engine = Engine(ModelRunner(model, config.num_blocks, 16), config)  # type: ignore[arg-type]
    greedy = SamplingParams(max_tokens=8, temperature=0.0)
    return [answer for prompt in prompts for answer in engine.generate([prompt], greedy)]


@pytest.mark.parametrize("int8", [False, True])
def test_chunks_at_blocks_and_cached_prefixes_change_no_answer(int8: bool) -> None:
    """The prefix cache gives whole blocks; where a hit ends at a multiple of 64 the rest is computed as before."""
    model = lower(sparse(int8=int8), TARGET)
    first, other = (ids.tolist() for ids in random_ids([LENGTH - 10, 100]))
    prompts = [first, [*first[:512], *other[:90]]]
    alone = [answers(model, [prompt])[0] for prompt in prompts]
    assert answers(model, prompts, max_num_batched_tokens=64) == alone
    assert answers(model, prompts) == alone
