"""The KV manager keeps the tables of blocks in agreement."""

from __future__ import annotations

from optkit.graph.kv_layout import kv_layout, one_group
from optkit.graph.states import KVSpec, token_bytes
from optkit.runtime.kv.manager import KVManager
from optkit.runtime.kv.prefix_cache import PrefixCache
from optkit.runtime.kv.windows import held_blocks
from optkit.runtime.scheduling.scheduler import Scheduler
from optkit.runtime.types import NO_BLOCK, EngineRequest, Request, SamplingParams
from tests.support.schedulers import add, advance, make


def test_room_for_a_load_may_push_out_what_was_to_be_loaded() -> None:
    """One host block and no free block: the block that the load evicts takes its own host block."""
    kv = KVManager(3, 2, PrefixCache(2), num_host_blocks=1)

    def computed(ids: list[int]) -> Request:
        request = EngineRequest(
            request_id=str(ids), prompt_ids=tuple(ids), sampling=SamplingParams(max_tokens=1), arrival=0.0
        )
        request = Request(request, list(ids))
        assert kv.admit(request, len(ids))
        request.num_computed = len(ids) - 1
        kv.publish(request)
        return request

    for ids in ([1, 2, 3], [5, 6, 7, 8, 9]):  # the second pushes the first one's block into the host block
        kv.release(computed(ids))
    other = computed([10])  # on the only free block
    assert [t.save for t in kv.take_transfers()] == [True]
    again = Request(
        EngineRequest(
            request_id="again", prompt_ids=(1, 2, 3), sampling=other.received.sampling, arrival=0.0
        ),
        [1, 2, 3],
    )
    assert kv.cached_tokens(again) == 2
    assert kv.admit(again, 3)
    assert again.num_computed == 0 and [len(table) for table in again.block_tables] == [2]
    assert all(t.save for t in kv.take_transfers())
    kv.check([other, again])


# -- windows: five layers in six read the last 512 tokens, as in Gemma 3 ------------------------------------

GEMMA = [KVSpec(layer, 1, 256, 256, window=0 if layer % 6 == 5 else 512) for layer in range(30)]
LENGTH, SIZE, STEP = 8192, 32, 512


def long_scheduler(windows: tuple[int, ...], num_blocks: int, **limits: int) -> Scheduler:
    return make(
        kv_windows=windows, num_blocks=num_blocks, block_size=SIZE, max_model_len=2 * LENGTH,
        max_num_batched_tokens=STEP, max_num_seqs=64, **limits,
    )  # fmt: skip


def prefilled(scheduler: Scheduler) -> None:
    """Run steps until all requests decode."""
    while any(request.num_pending > 1 for request in scheduler.running + scheduler.waiting):
        advance(scheduler)


def test_a_sequence_of_8192_tokens_holds_less_than_a_quarter_of_full_kv() -> None:
    """Blocks of the pool in use, times their bytes, by the formula and without it."""
    layout = kv_layout(GEMMA)
    scheduler = long_scheduler(layout.windows, 4000)
    add(scheduler, "r", LENGTH - 1, 40)
    prefilled(scheduler)
    advance(scheduler)
    (request,) = scheduler.running
    assert request.num_computed == LENGTH
    held = scheduler.stats().kv_blocks_used * layout.block_bytes(SIZE)
    assert held == (5 * 256 + 25 * (256 - (8192 - 511) // 32)) * SIZE * GEMMA[0].token_bytes
    assert held <= 0.25 * LENGTH * token_bytes(GEMMA)
    scheduler.schedule()  # with the block of the next token
    assert scheduler.stats().kv_blocks_used == held_blocks(layout.windows, LENGTH + 1, SIZE)


def test_blocks_behind_a_window_are_used_by_other_sequences() -> None:
    """The memory of four sequences with full KV holds fifteen and more, all decoding at once."""
    layout, full = kv_layout(GEMMA), one_group(GEMMA)
    num_bytes = 4 * (LENGTH + 8 * SIZE) * token_bytes(GEMMA)

    def together(windows: tuple[int, ...], num_blocks: int) -> int:
        scheduler = long_scheduler(windows, num_blocks)
        for number in range(30):
            add(scheduler, f"r{number}", LENGTH, 1000)
        most = 0
        for _ in range(400):
            advance(scheduler)
            if scheduler.num_preemptions:
                break
            most = max(most, sum(request.num_pending == 1 for request in scheduler.running))
        return most

    assert together(full.windows, full.blocks_in(num_bytes, SIZE)) == 4
    assert together(layout.windows, layout.blocks_in(num_bytes, SIZE)) >= 15


def windowed_kv(num_blocks: int = 40) -> KVManager:
    """A full group and two with a window of 5 tokens, blocks of 2, chunks of up to 4 tokens."""
    windows = (0, 5, 5)
    return KVManager(num_blocks, 2, PrefixCache(2, num_groups=3), windows=windows, tokens_in_flight=4)


def sequence(ids: list[int]) -> Request:
    params = SamplingParams(max_tokens=1)
    return Request(
        EngineRequest(request_id="r", prompt_ids=tuple(ids), sampling=params, arrival=0.0), list(ids)
    )


def run(kv: KVManager, request: Request, step: int = 4) -> None:
    """Prefill ``request`` up to the last token."""
    end = len(request.token_ids) - 1
    while request.num_computed < end:
        stop = min(end, request.num_computed + step)
        assert kv.cover(request, stop)
        request.num_computed = stop
        kv.publish(request)
        kv.check([request])


def evict(kv: KVManager, block: int) -> None:
    """Give the cached ``block`` to another owner, and free it again."""
    assert kv.blocks.is_cached(block)
    kv.blocks._take(block)
    kv.blocks.free([block])


def test_a_prefix_is_found_where_each_window_has_its_last_blocks() -> None:
    kv = windowed_kv()
    first = sequence(list(range(1, 20)))
    assert kv.admit(first, 20)
    run(kv, first)
    assert [table.count(NO_BLOCK) for table in first.block_tables] == [0, 7, 7]
    kv.release(first)
    assert kv.cached_tokens(sequence([*range(1, 20), 30])) == 18
    assert kv.cached_tokens(sequence([*range(1, 9), 40])) == 8  # blocks that left the window are still cached
    second = sequence([*range(1, 20), 30])
    assert kv.admit(second, 21)
    assert second.num_computed == 18 and [t.count(NO_BLOCK) for t in second.block_tables] == [0, 7, 7]
    kv.check([second])


def test_a_prefix_ends_before_a_window_that_lost_a_block() -> None:
    kv = windowed_kv()
    first = sequence(list(range(1, 20)))
    assert kv.admit(first, 20)
    run(kv, first)
    nodes = list(first.nodes)
    kv.release(first)
    evict(kv, nodes[7].kv[2].block)
    assert (
        kv.cached_tokens(sequence([*range(1, 20), 30])) == 14
    )  # blocks 5 and 6 are in the window, 7 is lost
    evict(kv, nodes[2].kv[0].block)
    assert kv.cached_tokens(sequence([*range(1, 20), 30])) == 4  # the full group reads every block
