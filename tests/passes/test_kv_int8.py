"""kv_int8: which layers, how close, the same tokens in any batch, and where it is refused."""

from __future__ import annotations

import pytest

from optkit.graph.ir import Graph
from optkit.graph.verify import verify
from optkit.kernels import reference
from optkit.lowering.lower import lower
from optkit.runtime.engine import Engine
from optkit.runtime.runner import ModelRunner
from optkit.runtime.scheduling.scheduler import SchedulerConfig
from optkit.runtime.types import SamplingParams
from tests.support.graphs import apply, captured, dense, random_ids, relative_error
from tests.support.ragged import ragged_logits
from tests.support.target import TARGET

NAMES = ["llama", "mistral", "gemma2", "gpt2", "phi3"]


def int8(name: str, *, flash: bool = True, **options: object) -> Graph:
    graph = captured(name)
    if flash:
        apply(graph, "flash_attention")
    apply(graph, "kv_int8", **options)
    return graph


@pytest.mark.parametrize("name", NAMES)
def test_close_to_float(name: str) -> None:
    graph = int8(name)
    verify(graph)
    (ids,) = random_ids([37])
    error = relative_error(dense(graph, ids), dense(captured(name), ids))
    assert 1e-5 < error < 0.1


@pytest.mark.parametrize("programs", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_kernel_and_reference_agree_in_chunks_and_scattered_blocks(name: str, programs: bool) -> None:
    """The pools are full of NaN where nothing was written."""
    graph = int8(name)
    model = lower(graph, TARGET, programs=programs)
    prompts = random_ids((29, 7, 41))
    for prompt, logits in zip(prompts, ragged_logits(model, prompts), strict=True):
        expected = dense(graph, prompt)
        # A number of K or V on the edge of two steps may go to either, as the last bits of what it is made of say.
        assert relative_error(logits, expected) < 5e-3


@pytest.mark.parametrize("order", [("flash_attention", "kv_int8"), ("kv_int8", "flash_attention")])
def test_with_flash_attention_in_either_order(order: tuple[str, str]) -> None:
    graph = captured("llama")
    for name in order:
        apply(graph, name)
    assert {node.meta["kernel"] for node in graph.calls(reference.attention)} == {"native"}
    assert lower(graph, TARGET).kernels["attention"] == "native"


def engine(graph: Graph, num_blocks: int, max_num_batched_tokens: int) -> Engine:
    model = lower(graph, TARGET)
    config = SchedulerConfig(
        max_num_seqs=6,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=64,
        block_size=4,
        num_blocks=num_blocks,
    )
    return Engine(ModelRunner(model, num_blocks, config.block_size), config)


def test_tokens_do_not_depend_on_batch_or_chunks() -> None:
    graph = int8("llama")
    for name in (
        "fuse_qkv",
        "fuse_gate_up",
        "fuse_add_rms_norm",
        "int8",
    ):  # int8: its sums do not depend on rows
        apply(graph, name)
    prompts = [[(7 * i + 3 * j) % 128 for j in range(5 * i + 1)] for i in range(6)]
    sampling = SamplingParams(max_tokens=12, temperature=0.0)
    roomy = engine(graph, 64, 64)
    alone = [roomy.generate([prompt], sampling)[0] for prompt in prompts]
    scarce = engine(graph, 15, 7)
    assert scarce.generate(prompts, sampling) == alone
    assert scarce.stats().num_preemptions > 0
    assert scarce.info().memory_plan.dtype == "int8"
    assert scarce.runner.kv_bytes == 15 * 4 * 160
