"""The KV manager keeps the tables of blocks in agreement."""

from __future__ import annotations

from optkit.runtime.kv.manager import KVManager
from optkit.runtime.kv.prefix_cache import PrefixCache
from optkit.runtime.types import EngineRequest, Request, SamplingParams


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
