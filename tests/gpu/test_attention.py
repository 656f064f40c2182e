"""What the interpreter cannot compute: attention in bfloat16, a cache in float8, and sampling, at a model's shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bench.gpu.case import Case
from bench.gpu.cases import attention, rope_kv, sampling
from optkit.kernels.triton import attention as kernels
from tests.kernels.triton.worlds import Shape, World, error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
MAX_BYTES = 1 << 28
CASES = [
    case
    for module in (attention, rope_kv, sampling)
    for case in module.cases()
    if case.bytes < MAX_BYTES and not case.shape.startswith(("prefill 4096", "prefill 8192"))
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.op}-{c.kernel}-{c.dtype}-{c.shape}")
def test_case(case: Case) -> None:
    device = torch.device("cuda")
    inputs = case.make(device, torch.Generator(device).manual_seed(3))
    exact = case.reference(*inputs)
    torch.full((1 << 26,), float("nan"), device=device)  # what outputs are allocated over
    got = case.run(*inputs)
    for g, e in zip(*((r,) if isinstance(r, Tensor) else r for r in (got, exact)), strict=True):
        assert float((g.double() - e.double()).abs().max() / e.double().abs().max()) <= case.tolerance


@pytest.mark.parametrize("pool", [torch.bfloat16, torch.int8, torch.uint8])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(new=(500, 1, 70, 1), old=(0, 900, 300, 33), heads=12, kv_heads=4, dim=128),
        Shape(new=(300, 1), old=(40, 900), heads=8, kv_heads=4, dim=256, window=128, softcap=50.0),
        Shape(new=(1, 1, 0), old=(2000, 5, 0), heads=4, kv_heads=4, dim=80),
        Shape(new=(5,), old=(3000,), heads=7, kv_heads=1, dim=64),
    ],
    ids=["mixed", "window and cap", "decode", "chunk"],
)
def test_bfloat16(shape: Shape, pool: torch.dtype) -> None:
    with torch.device("cuda"):
        world = World(replace(shape, dtype=torch.bfloat16, pool=pool))
    assert error(world.call(kernels.attention), world.expected()) < 1e-2


def test_a_graph_replays_with_other_lengths() -> None:
    """Captured for the longest, with padding; replayed for other sequences in the same buffers."""
    shape = Shape(
        new=(1, 1, 1, 0), old=(900, 900, 900, 0), heads=8, kv_heads=2, dim=64, dtype=torch.bfloat16, pool=torch.bfloat16
    )  # fmt: skip
    with torch.device("cuda"):
        world = World(shape)
    world.call(kernels.attention)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = world.call(kernels.attention)
    world.seq_lens.copy_(torch.tensor([901, 17, 0, 300], device="cuda"))
    world.tables[3] = world.tables[0]
    world.slots.fill_(-1)
    graph.replay()
    assert error(out, world.expected()) < 1e-2 and not out[2].any()
