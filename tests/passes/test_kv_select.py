"""kv_select: which layers, the same tokens in any batch, within the budget those of all KV, and where it is refused."""

from __future__ import annotations

import msgspec
import pytest
import torch

from optkit.errors import UserError
from optkit.graph.ir import Graph
from optkit.graph.kv_layout import kv_layout
from optkit.graph.serialize import graph_from_json, graph_to_json
from optkit.graph.shapes import Point
from optkit.graph.states import PROMPT_LENS
from optkit.graph.verify import verify
from optkit.kernels import reference
from optkit.kernels.cpu import native
from optkit.lowering.dense import dense_inputs
from optkit.lowering.lower import lower
from optkit.machine.target import DATASHEETS
from optkit.parallel.check import compare
from optkit.parallel.rank_graph import rank_graph
from optkit.passes import load
from optkit.passes.base import PassContext
from optkit.recipe.engine_options import EngineOptions
from optkit.runtime.engine import Engine
from optkit.runtime.factory import scheduler_config
from optkit.runtime.kv.offload import MemoryBlocks
from optkit.runtime.kv.rolling import RollingWindow
from optkit.runtime.logits import RuntimeLogits
from optkit.runtime.runner import ModelRunner
from optkit.runtime.sampling.proposer import NgramProposer, Speculator
from optkit.runtime.scheduling.cost_model import CostModel
from optkit.runtime.scheduling.scheduler import Proposer, SchedulerConfig
from optkit.runtime.specprefill.graph import scoring_graph
from optkit.runtime.types import SamplingParams
from tests.support.architectures import GLOBAL, LOCAL
from tests.support.graphs import apply, captured, checked, dense, graph_cost, random_ids, reasons
from tests.support.speculation import Eager
from tests.support.target import TARGET

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))

BLOCK = 8
SMALL = {"budget": 4 * BLOCK, "min_context": 1, "dense": 1}
LONG = {"max_position_embeddings": 512}
SAMPLED = SamplingParams(max_tokens=30, temperature=1.0, seed=3)


def int8_graph(kv: str = "int8", **options: object) -> Graph:
    """A graph whose sums do not depend on the rows of a step."""
    graph = captured("llama", num_hidden_layers=3, **LONG)
    for name in ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm", "flash_attention", "int8"):
        apply(graph, name)
    if kv == "int8":
        apply(graph, "kv_int8")
    if options:
        apply(graph, "kv_select", **options)
    return graph


def engine(
    graph: Graph, num_blocks: int, tokens: int, proposer: Proposer | None = None, host: int = 0
) -> Engine:
    config = SchedulerConfig(
        max_num_seqs=6,
        max_num_batched_tokens=tokens,
        max_model_len=256,
        block_size=BLOCK,
        num_blocks=num_blocks,
        num_host_blocks=host,
    )
    runner = ModelRunner(lower(graph, TARGET), num_blocks, BLOCK)
    store = MemoryBlocks(host, runner.read_block(0).nbytes) if host else None
    made = Engine(runner, config, store, proposer)
    made.scheduler.kv.worth_saving = lambda: True
    return made


def prompts() -> list[list[int]]:
    stem = [(7 * i + 3 * (i // 5)) % 128 for i in range(90)]
    return [stem, [*stem[:50], 5], [*stem[:70], 9, 8], [4], [*stem[:27], 5, 6, 7, 8]]


def test_layers_but_the_first_select_when_the_kernel_reads_their_cache() -> None:
    graph = int8_graph()
    plan = apply(graph, "kv_select", **SMALL)
    verify(graph)
    assert [site.name for site in plan.sites] == ["layer 1", "layer 2"]
    assert reasons(plan) == {"one of the first 1 layers, which read the whole context"}
    calls = list(graph.calls(reference.selected_attention))
    assert {call.kwargs["budget"] for call in calls} == {32} and len(calls) == 2
    assert [spec.bounds for spec in graph.meta.kv_specs] == [False, True, True]
    model = lower(graph, TARGET)
    assert "native" in {kernel for name, kernel in model.kernels.items() if "selected" in name}
    assert {"k_bounds_1", "k_bounds_2", PROMPT_LENS} <= set(model.inputs)


def test_three_layers_in_ten_read_everything_by_default() -> None:
    plan = checked(int8_graph(), "kv_select", budget=16, min_context=1)[1]
    assert [site.name for site in plan.sites] == ["layer 1", "layer 2"]
    plan = checked(int8_graph(), "kv_select", budget=16, min_context=1, ignore=[2])[1]
    assert [site.name for site in plan.sites] == ["layer 1"]


def test_prompts_have_the_logits_of_a_model_without_the_pass() -> None:
    (ids,) = random_ids([150])
    before, after = int8_graph(), int8_graph(**SMALL)
    assert torch.equal(dense(before, ids, TARGET), dense(after, ids, TARGET))


def test_sparse_prefill_and_choice_of_blocks_go_together() -> None:
    sparse = {"cover": 0.7, "min_tokens": 64, "measure_tokens": 0}
    (ids,) = random_ids([400])
    before, after, first = int8_graph(), int8_graph(), int8_graph(**SMALL)
    apply(before, "sparse_prefill", **sparse)
    apply(after, "sparse_prefill", **sparse)
    apply(after, "kv_select", **SMALL)
    apply(first, "sparse_prefill", **sparse)
    found = [dense(graph, ids, TARGET) for graph in (before, after, first)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert not torch.equal(found[0], dense(int8_graph(), ids, TARGET))
    assert (dense(after, ids) - found[1]).abs().max() < 0.2 * (
        dense(int8_graph(), ids) - found[1]
    ).abs().max()
    inputs = dense_inputs([len(ids)], ids, after.meta.states)
    generated = lower(after, TARGET)(inputs | {PROMPT_LENS: torch.tensor([60], dtype=torch.int32)})
    assert not torch.equal(generated[64:], found[1][64:])


def test_scores_of_prompts_read_everything() -> None:
    graph = int8_graph(**{**SMALL, "dense": 0})
    (ids,) = random_ids([150])
    for layers, bounded in ((2, {"k_bounds_0"}), (3, {"k_bounds_0", "k_bounds_1"})):
        scores = []
        for each in (graph, int8_graph()):
            scoring, _ = scoring_graph(each, layers)
            scores.append(dense(scoring, ids, TARGET))
        assert torch.equal(*scores)
        inputs = {
            str(node.target) for node in scoring_graph(graph, layers)[0].fx.find_nodes(op="placeholder")
        }
        assert {name for name in inputs if name.startswith("k_bounds")} == bounded
    scoring, _ = scoring_graph(int8_graph(**{**SMALL, "dense": 2}), 2)
    assert PROMPT_LENS not in {str(node.target) for node in scoring.fx.find_nodes(op="placeholder")}


def test_answers_of_an_evaluation_select_as_a_server_does() -> None:
    (ids,) = random_ids([150])
    context, tail = ids[:140].tolist(), ids[140:].tolist()
    whole, some = (lower(graph, TARGET) for graph in (int8_graph(), int8_graph(**SMALL)))
    wanted, found = (
        next(RuntimeLogits(model, BLOCK).branches(context, [(tail, len(tail) - 1)]))
        for model in (whole, some)
    )
    assert not torch.equal(found, wanted)
    assert torch.equal(found[0], wanted[0])  # at the last token of the prompt
    served = engine(int8_graph(**SMALL), 200, 512)
    greedy = SamplingParams(max_tokens=8, temperature=0.0)
    ((tokens),) = served.generate([context], greedy)
    assert RuntimeLogits(some, BLOCK, decode=1).greedy([context], 8) == [tokens]


def test_native_program_and_reference_agree_when_tokens_select() -> None:
    graph = int8_graph("float32", **SMALL)
    (ids,) = random_ids([150])
    inputs = dense_inputs([len(ids)], ids, graph.meta.states) | {
        PROMPT_LENS: torch.tensor([60], dtype=torch.int32)
    }
    fresh = [dict(inputs) for _ in range(3)]
    for each in fresh:
        each |= {name: torch.zeros_like(x) for name, x in each.items() if name.startswith(("k_", "v_"))}
    found = [
        lower(graph, TARGET, programs=programs)(each)
        for programs, each in zip((True, False), fresh, strict=False)
    ]
    assert torch.equal(*found)
    wanted = lower(graph)(fresh[2])
    apart, selected = ((x - wanted).abs().amax(1)[64:] for x in (found[0], dense(int8_graph("float32"), ids)))
    assert apart.median() < 0.05 * selected.median()
    assert int((apart > 0.1).sum()) <= 2  # where two blocks have all but the same weight


@pytest.mark.parametrize("kv", ["float32", "int8"])
def test_tokens_are_those_of_all_kv_when_the_budget_covers_the_context(kv: str) -> None:
    wanted = engine(int8_graph(kv), 200, 512).generate(prompts(), SAMPLED)
    covered = int8_graph(kv, budget=128, min_context=1, dense=0)
    assert engine(covered, 200, 512).generate(prompts(), SAMPLED) == wanted
    selected = int8_graph(kv, budget=32, min_context=1, dense=0)
    assert engine(selected, 200, 512).generate(prompts(), SAMPLED) != wanted


@pytest.mark.parametrize("kv", ["float32", "int8"])
def test_tokens_do_not_depend_on_batch_chunks_preemption_offload_or_drafts(kv: str) -> None:
    graph = int8_graph(kv, **SMALL)
    roomy = engine(graph, 200, 512)
    alone = [roomy.generate([prompt], SAMPLED)[0] for prompt in prompts()]
    assert [roomy.generate([prompt], SAMPLED)[0] for prompt in prompts()] == alone
    assert roomy.stats().prefix_cache_hits > 0
    scarce = engine(graph, 24, 13, host=60)
    assert scarce.generate(prompts(), SAMPLED) == alone
    assert scarce.generate(prompts(), SAMPLED) == alone
    stats = scarce.stats()
    assert stats.num_preemptions > 0 and stats.offload_loads > 0
    drafting = engine(graph, 200, 512, Speculator(NgramProposer(), Eager(CostModel(), 4)))
    greedy = SamplingParams(max_tokens=40, temperature=0.0)
    assert drafting.generate(prompts(), greedy) == roomy.generate(prompts(), greedy)
    assert drafting.stats().spec_decode_draft_tokens > 0


def test_ranks_share_the_heads_of_layers_that_select() -> None:
    graph = captured("llama", num_hidden_layers=3, num_key_value_heads=4, **LONG)
    for name in ("fuse_qkv", "fuse_gate_up", "flash_attention", "int8", "kv_int8"):
        apply(graph, name)
    apply(graph, "kv_select", **SMALL)
    (ids,) = random_ids([120])
    assert compare(graph, 2, ids, TARGET).is_equal
    specs = rank_graph(graph, 0, 2).meta.kv_specs
    assert [spec.bounds for spec in specs] == [False, True, True] and {
        spec.num_kv_heads for spec in specs
    } == {2}


def test_bytes_of_bounds_count_in_the_memory_of_the_pool() -> None:
    before, after = int8_graph(), int8_graph(**SMALL)
    sizes = [kv_layout(graph.meta.states).block_bytes(BLOCK) for graph in (before, after)]
    spec = after.meta.kv_specs[1]
    share = reference.bounds_token_bytes(spec.num_kv_heads, spec.head_dim)
    assert share == -(-spec.num_kv_heads * (2 * spec.head_dim + 4) // 8)
    assert sizes[1] - sizes[0] == 2 * BLOCK * share
    running = engine(after, 30, 64)
    assert running.runner.kv_bytes == 30 * sizes[1] == 30 * running.runner.read_block(0).nbytes


def test_cost_model_counts_what_a_decode_reads() -> None:
    before, after = int8_graph(), int8_graph(**SMALL)
    for point in (Point(200, 1, 200), Point(1, 1, 20)):
        assert graph_cost(after, point) == graph_cost(before, point)
    point = Point(1, 1, 200)
    assert graph_cost(after, point).kv_bytes < 0.7 * graph_cost(before, point).kv_bytes


def test_least_context_is_where_the_cost_model_sees_a_gain() -> None:
    graph = int8_graph()
    optimization, plan = checked(graph, "kv_select", budget=64, dense=0)
    if plan.sites:
        assert 64 < optimization.least(graph, plan, PassContext(TARGET)) < 512
    else:
        assert any("no gain is predicted" in reason for reason in reasons(plan))
    plan = checked(graph, "kv_select", budget=1024, min_context=1)[1]
    assert any(
        "no gain is predicted up to the model's context of 512 tokens" in reason for reason in reasons(plan)
    )


def test_rolling_window_is_refused_in_a_line_by_the_server_and_for_a_request() -> None:
    """Sinks stand in the place of other keys, whose bounds stay, and what is forgotten moves the end of the prompt."""
    model, window = lower(int8_graph(**SMALL), TARGET), RollingWindow(window=64, sinks=4)
    options = EngineOptions(kv_cache_bytes=1 << 24, block_size=BLOCK)
    limits = scheduler_config(model, options)
    reason = limits.refusal(5, 5, window) or ""
    assert "can't forget tokens" in reason and "leave kv_select out of the recipe" in reason
    assert "\n" not in reason and limits.refusal(5, 5) is None
    rolling = msgspec.structs.replace(options, rolling_window=64)
    with pytest.raises(UserError, match="leave kv_select out of the recipe"):
        scheduler_config(model, rolling)
    assert scheduler_config(lower(int8_graph(), TARGET), rolling).refusal(5, 5, window) is None


def test_graph_file_keeps_the_choice() -> None:
    graph = int8_graph(**SMALL)
    read = graph_from_json(graph_to_json(graph), lambda name, origin, dtype: graph.weights[name].value)
    verify(read)
    assert read.meta.states == graph.meta.states
    found, wanted = ([n.kwargs for n in g.calls(reference.selected_attention)] for g in (read, graph))
    assert found == wanted


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mistral", "it reads a window of the context already"),
        ("gemma3_text", "its blocks are shared with layers that have a window"),
        ("bloom", "its scores depend on distances, which chosen blocks do not keep"),
    ],
)
def test_layers_are_left_alone_when_blocks_are_no_choice(name: str, reason: str) -> None:
    plan = checked(windowed(name), "kv_select", budget=16, min_context=1, dense=0)[1]
    assert not plan.sites and reasons(plan) == {reason}


def windowed(name: str) -> Graph:
    if name == "gemma3_text":
        return captured(name, num_hidden_layers=6, layer_types=[LOCAL] * 5 + [GLOBAL])
    return captured(name)


def test_gpu_has_no_kernel() -> None:
    graph = captured("llama")
    optimization = load("kv_select")(load("kv_select").Config(min_context=1, budget=16, dense=0))
    plan = optimization.check(graph, PassContext(DATASHEETS["cuda-h100"]))
    assert not plan.sites and any("no kernel chooses blocks" in reason for reason in reasons(plan))
