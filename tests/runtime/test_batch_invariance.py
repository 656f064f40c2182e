"""Tokens do not depend on the batch or on chunks: int8 and int4 weights, int8 embedding, int8 KV cache, native
kernels.
"""

from __future__ import annotations

import pytest
import torch

from optkit.kernels.cpu import native
from optkit.lowering.lower import Executable, lower
from optkit.runtime.engine import Engine
from optkit.runtime.runner import ModelRunner
from optkit.runtime.scheduling.scheduler import SchedulerConfig
from optkit.runtime.types import SamplingParams
from tests.support.graphs import apply, captured
from tests.support.target import TARGET

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))

BLOCKS, BLOCK = 128, 8
SEEDED = SamplingParams(max_tokens=6, temperature=1.5, seed=7)


@pytest.fixture(scope="module", params=["int8", "w4a8"])
def model(request: pytest.FixtureRequest) -> Executable:
    graph = captured("llama", tie_word_embeddings=True)
    for name in ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm", "select_logits_rows"):
        apply(graph, name)
    if request.param == "w4a8":
        apply(graph, "w4a8", group_size=32)
    apply(graph, "int8", group_size=32, lm_head=True, weight_only=["lm_head"], embedding=True)
    apply(graph, "flash_attention")
    apply(graph, "kv_int8")
    return lower(graph, TARGET)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(3, 128, (1 + 7 * i % 50,), generator=generator).tolist() for i in range(24)]


def answers(model: Executable, sequences: int, tokens: int) -> list[list[int]]:
    config = SchedulerConfig(
        max_num_seqs=sequences,
        max_num_batched_tokens=tokens,
        max_model_len=128,
        block_size=BLOCK,
        num_blocks=BLOCKS,
    )
    return Engine(ModelRunner(model, BLOCKS, BLOCK), config).generate(prompts(), SEEDED)


@pytest.mark.parametrize(("sequences", "tokens"), [(1, 5), (4, 2048), (4, 16), (16, 2048), (16, 19)])
def test_any_batch_and_any_chunk_gives_the_same_tokens(
    model: Executable, sequences: int, tokens: int
) -> None:
    alone = answers(model, 1, 2048)
    assert len({tuple(answer) for answer in alone}) > 12  # they are not all the same
    assert answers(model, sequences, tokens) == alone
