"""Attention of a whole prompt by the vendor's library."""

from __future__ import annotations

import pytest
import torch

from optkit.kernels.triton import attention, sdpa, selection
from optkit.kernels.whole_prompt import WholePrompt, whole_prompt
from tests.kernels.triton.test_attention import TOLERANCE
from tests.kernels.triton.worlds import Shape, World, error

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def test_a_whole_prompt_by_the_vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where the runtime promises one and the table says so; then with the same result as from the cache."""
    world = World(Shape(new=(17,), old=(0,), heads=2, kv_heads=1, dtype=torch.float16, pool=torch.float16))
    monkeypatch.setattr(selection, "winner", lambda *layer: "sdpa")
    promise = WholePrompt()
    with whole_prompt(promise):
        assert error(world.call(attention.attention), world.expected()) < TOLERANCE[torch.float16]
    assert promise.used
    for shape, more in (
        (Shape(new=(17,), old=(0,), pool=torch.int8, dtype=torch.float16), {}),
        (Shape(new=(17,), old=(0,), softcap=30.0, dtype=torch.float16, pool=torch.float16), {}),
        (Shape(new=(17,), old=(0,), window=8, dtype=torch.float16, pool=torch.float16), {}),
        (Shape(new=(17,), old=(0,), dtype=torch.float16, pool=torch.float16), {"winner": "triton"}),
    ):
        monkeypatch.setattr(selection, "winner", lambda *layer, more=more: more.get("winner", "sdpa"))
        promise, other = WholePrompt(), World(shape)
        with whole_prompt(promise):
            assert error(other.call(attention.attention), other.expected()) < 1e-2
        assert not promise.used
    assert (
        error(sdpa.dense(world.q, world.k, world.v, world.scale), world.expected()) < TOLERANCE[torch.float16]
    )
