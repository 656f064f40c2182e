"""Loading an engine: the KV cache of a GPU gets what is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from optkit.graph.kv_layout import one_group
from optkit.lowering.lower import lower
from optkit.recipe.engine_options import engine_options
from optkit.runtime import factory
from optkit.runtime.cuda.device import HostDevice
from tests.support.graphs import captured
from tests.support.shelf import RECIPE, Shelf

FREE, DRAFT_BYTES, DRAFT_STEP = 700 << 20, 100 << 20, 3 << 20


class GPU(HostDevice):
    """Has less memory free when a second model is loaded, and counts the steps it profiles."""

    def __init__(self, shelf: Shelf) -> None:
        super().__init__()
        self.shelf, self.profiled = shelf, 0

    def free_memory(self) -> tuple[int, int]:
        return FREE - DRAFT_BYTES * (len(self.shelf.loaded) - 1), 1 << 30

    def peak_bytes(self, step: Callable[[], Any]) -> int:
        step()
        self.profiled += 1
        return DRAFT_STEP if self.profiled < len(self.shelf.loaded) else 0  # the draft model's comes first


def blocks_on_a_gpu(shelf: Shelf, monkeypatch: pytest.MonkeyPatch, directory: str, **given: Any) -> int:
    """The blocks in the pool of an engine on ``GPU``."""
    found: list[int] = []
    shelf.loaded.clear()

    def make_engine(model: Any, config: Any, gpu: Any, *rest: Any) -> Any:
        assert isinstance(gpu, GPU)
        found.append(config.num_blocks)
        raise Made

    gpu = GPU(shelf)
    options = msgspec.structs.replace(engine_options(RECIPE, given), kv_cache_bytes=None)
    monkeypatch.setattr(factory, "device_of", lambda model: gpu)
    monkeypatch.setattr(factory, "make_engine", make_engine)
    with pytest.raises(Made):
        factory.load_engine(directory, options)
    return found[0]


class Made(Exception):
    """The engine would be made now."""


def test_kv_cache_gets_what_a_draft_model_leaves(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lower(captured("llama"))
    block = one_group(model.states).block_bytes(RECIPE.runtime.block_size)
    large, small = shelf.put("large"), shelf.put("small")
    drafted = blocks_on_a_gpu(shelf, monkeypatch, large, speculative_model=small)
    plain = blocks_on_a_gpu(shelf, monkeypatch, large)
    assert plain - drafted == pytest.approx((DRAFT_BYTES + DRAFT_STEP) / block, abs=1)
