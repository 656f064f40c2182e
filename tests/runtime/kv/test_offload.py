"""Offload store, and what it is for: little KV memory changes no token, and costs no second prefill."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from optkit.errors import UserError
from optkit.kernels.cpu import native
from optkit.runtime.engine import Engine
from optkit.runtime.kv.offload import (
    CorruptBlock,
    FileBlocks,
    HostBlockStore,
    HostBlockTable,
    MemoryBlocks,
    open_store,
)
from optkit.runtime.kv.prefix_cache import Node, NodeKV
from optkit.runtime.types import SamplingParams
from tests.runtime.kv.test_prefix_cache import cached
from tests.support import tiny_runtime
from tests.support.fakes import FakeRunner, fake_engine

needs_native = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))


def node_kv(name: int) -> NodeKV:
    return NodeKV(Node(bytes([name]), "", (name,)))


def test_a_full_table_gives_away_the_slot_not_used_for_longest() -> None:
    table = HostBlockTable(2)
    a, b, c = node_kv(1), node_kv(2), node_kv(3)
    assert table.take(a) is None and table.take(b) is None
    table.touch(a)
    assert table.take(c) is b and b.host_block is None
    table.check()
    table.release(a)
    assert len(table) == 1 and table.take(b) is None
    table.check()


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> HostBlockStore:
    return MemoryBlocks(3, 64) if request.param == "memory" else FileBlocks(3, 64, tmp_path)


def test_a_slot_gives_back_what_it_was_given(store: HostBlockStore) -> None:
    data = [np.arange(i, i + 64, dtype=np.uint8) for i in range(3)]
    for host_block in (2, 0, 1, 2):
        store.write(host_block, data[host_block])
    assert all((store.read(host_block) == data[host_block]).all() for host_block in range(3))


def test_the_file_has_no_name_and_nobody_else_can_read_it(tmp_path: Path) -> None:
    store = FileBlocks(3, 64, tmp_path)
    store.write(0, np.zeros(64, dtype=np.uint8))
    assert list(tmp_path.iterdir()) == []
    mode = os.fstat(store._file)
    assert stat.S_IMODE(mode.st_mode) == 0o600 and mode.st_nlink == 0


def test_what_the_disk_changed_is_refused(tmp_path: Path) -> None:
    store = FileBlocks(3, 64, tmp_path)
    store.write(1, np.ones(64, dtype=np.uint8))
    os.pwrite(store._file, b"\0", 64 + 5)
    with pytest.raises(CorruptBlock):
        store.read(1)
    with pytest.raises(CorruptBlock):  # never written
        store.read(0)


@pytest.mark.parametrize(("num_bytes", "name"), [(63, "."), (64, "nowhere")])
def test_a_store_that_cannot_be_is_refused_at_the_start(tmp_path: Path, num_bytes: int, name: str) -> None:
    with pytest.raises(UserError):
        open_store(num_bytes, 64, tmp_path / name)


def test_a_chat_that_pauses_goes_on_without_prefill() -> None:
    """Its blocks are needed by others meanwhile; the next turn loads them back."""
    engine = fake_engine(options={"num_blocks": 8, "num_host_blocks": 16})
    chat, others = list(range(1, 13)), [[30 + i] * 20 for i in range(4)]
    cached(engine, chat)
    for other in others:
        cached(engine, other)
    assert engine.stats().kv_blocks_offloaded > 0
    assert cached(engine, [*chat, 20, 21]) == 12
    assert engine.stats().offload_loads == 3


def test_a_lost_slot_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine(options={"num_blocks": 8, "num_host_blocks": 16})
    plain = fake_engine(options={"enable_prefix_caching": False})
    chat = list(range(1, 13))
    greedy = SamplingParams(max_tokens=4, temperature=0.0)
    for prompt in (chat, *[[30 + i] * 20 for i in range(4)]):
        engine.generate([prompt], greedy)

    def lost(host_block: int) -> np.ndarray:
        raise OSError("the disk is gone")

    monkeypatch.setattr(engine.store, "read", lost)
    assert engine.generate([chat, [9, 9, 9]], greedy) == plain.generate([chat, [9, 9, 9]], greedy)
    assert engine.stats().kv_blocks_used == 0
    engine.scheduler.check()


def test_what_is_cheaper_to_compute_is_not_saved_for_a_while() -> None:
    engine = Engine(FakeRunner(num_blocks=8), fake_engine(options={"num_blocks": 8}).config)
    engine._copy_seconds = 10 * engine.scheduler.cost.added_seconds(4)
    asked = [engine.scheduler.kv.worth_saving() for _ in range(1000)]
    assert not asked[0] and asked[-1]


@needs_native
def test_a_block_travels_through_the_store_to_the_bit() -> None:
    engine = tiny_runtime.engine()
    engine.generate(tiny_runtime.prompts(4), SamplingParams(max_tokens=4, temperature=0.0))
    data = engine.runner.read_block(2)
    assert data.any()
    engine.runner.write_block(77, data)
    assert (engine.runner.read_block(77) == data).all()
    for name, pool in engine.runner.kv_pools.items():
        assert (pool[77] == pool[2]).all(), name


def pressed(count: int, host_blocks: int, temperature: float) -> tuple[int, int]:
    """Serve ``count`` prompts with a quarter of the KV that they would like; preemptions and loads it took."""
    some = tiny_runtime.prompts(count, stems=4)
    sampling = [SamplingParams(max_tokens=24, temperature=temperature, seed=i) for i in range(count)]
    roomy = tiny_runtime.engine(enable_prefix_caching=False).generate(some, sampling)
    need = sum(-(-(len(p) + 24) // 8) for p in some[:8])  # eight sequences at once
    engine = tiny_runtime.engine(num_blocks=max(need // 4, 14), num_host_blocks=host_blocks)
    assert engine.generate(some, sampling) == roomy
    assert engine.stats().kv_blocks_used == 0
    return engine.stats().num_preemptions, engine.stats().offload_loads


@needs_native
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("host_blocks", [0, 40])
def test_a_quarter_of_the_kv_changes_no_token(host_blocks: int, temperature: float) -> None:
    preemptions, loads = pressed(24, host_blocks, temperature)
    assert preemptions > 0
    assert (loads > 0) == (host_blocks > 0)


@needs_native
@pytest.mark.soak
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("host_blocks", [0, 400])
def test_two_hundred_prompts_with_a_quarter_of_the_kv(host_blocks: int, temperature: float) -> None:
    pressed(200, host_blocks, temperature)
