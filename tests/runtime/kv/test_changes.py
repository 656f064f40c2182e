"""The log of changes: deltas, snapshots after a gap, and what counts as held."""

from __future__ import annotations

from collections import deque

import pytest

from optkit.runtime.kv.changes import LEAST_ENTRIES, ChangeLog
from optkit.runtime.kv.manager import KVManager
from optkit.runtime.kv.prefix_cache import Node, PrefixCache
from optkit.runtime.report import BlockChanges, Mark
from optkit.runtime.types import EngineRequest, Request, SamplingParams

SECRET = bytes(range(32))


def node(number: int) -> Node:
    return Node(bytes([number]), "", (number,))


def test_a_question_is_answered_with_the_net_changes_since_its_mark() -> None:
    log, nodes = ChangeLog(8), [node(n) for n in range(4)]
    log.record(nodes[0], True)
    log.record(nodes[1], True)
    mark = log.mark
    log.record(nodes[1], False)
    log.record(nodes[2], True)
    log.record(nodes[3], True)
    log.record(nodes[3], False)  # came and went: no change
    log.record(nodes[0], False)
    log.record(nodes[0], True)  # went and came back
    found = log.since(mark, list)
    assert found == BlockChanges(log.mark, added=(b"\2",), dropped=(b"\1",))
    assert log.since(log.mark, list) == BlockChanges(log.mark)


def test_after_a_gap_or_a_restart_the_answer_has_all_blocks() -> None:
    log = ChangeLog(8)
    log._entries = deque(maxlen=3)
    start = log.mark
    for number in range(4):
        log.record(node(number), True)
    everything = [bytes([n]) for n in range(4)]
    for mark in (start, Mark(), Mark("another", 2), Mark(start.epoch, 9)):
        found = log.since(mark, lambda: everything)
        assert found == BlockChanges(log.mark, is_snapshot=True, added=tuple(everything))
    assert not log.since(Mark(start.epoch, 1), list).is_snapshot
    before = log.mark
    log.restart()
    assert log.since(before, list).is_snapshot


def test_the_log_is_bounded() -> None:
    log = ChangeLog(2)
    for number in range(3 * LEAST_ENTRIES):
        log.record(node(0), bool(number % 2))
    assert len(log._entries) == LEAST_ENTRIES


def computed(kv: KVManager, ids: list[int]) -> Request:
    """A request with all but the last token computed and published."""
    asked = EngineRequest(
        request_id=str(ids), prompt_ids=tuple(ids), sampling=SamplingParams(max_tokens=1), arrival=0.0
    )
    request = Request(asked, list(ids))
    assert kv.admit(request, len(ids))
    request.num_computed = len(ids) - 1
    kv.publish(request)
    return request


def test_an_offloaded_block_is_held_until_the_store_loses_it() -> None:
    kv = KVManager(2, 2, PrefixCache(2), num_host_blocks=1)
    kv.rekey(SECRET)
    kv.release(computed(kv, [1, 2, 3]))
    mark, first = kv.changes(Mark()).mark, kv.changes(Mark()).added
    assert len(first) == 1
    kv.release(computed(kv, [4, 5, 6]))  # on both blocks: the first is saved
    found = kv.changes(mark)
    assert found.dropped == () and len(found.added) == 1
    kv.release(computed(kv, [7, 8, 9]))  # the second is saved over the first
    assert kv.changes(mark).dropped == first


def test_windows_count_where_no_layer_keeps_all_tokens() -> None:
    kv = KVManager(8, 2, PrefixCache(2, num_groups=2), windows=(5, 5), tokens_in_flight=4)
    request = Request(
        EngineRequest(
            request_id="r", prompt_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=1), arrival=0.0
        ),
        [1, 2, 3],
    )
    assert kv.admit(request, 3) and kv.cover(request, 2)
    request.num_computed = 2
    kv.publish(request)
    assert len(kv.changes(Mark()).added) == 1
    kv.release(request)
    kv.reset()
    assert kv.changes(Mark()).added == ()


def test_digests_of_a_shared_secret_are_those_of_other_processes() -> None:
    managers = [KVManager(8, 2, PrefixCache(2)) for _ in range(2)]
    for kv in managers:
        mark = kv.changes(Mark()).mark
        kv.rekey(SECRET)
        assert kv.changes(mark).is_snapshot, "digests before mean nothing any more"
        computed(kv, [1, 2, 3, 4, 5])
    first, second = (kv.changes(Mark()).added for kv in managers)
    assert first == second and len(first) == 2


def test_the_secret_cannot_change_once_prompts_are_cached() -> None:
    kv = KVManager(8, 2, PrefixCache(2))
    computed(kv, [1, 2, 3])
    with pytest.raises(ValueError, match="cannot change"):
        kv.rekey(SECRET)


def test_prefixes_of_the_artifact_get_digests_of_the_secret() -> None:
    """Whether adopted before or after the secret is known."""

    def digests(*, early: bool) -> tuple[bytes, ...]:
        kv = KVManager(8, 2, PrefixCache(2), max_pinned_blocks=4)
        if early:
            kv.rekey(SECRET)
        kv.adopt("baked", [((1, 2), [True]), ((3, 4), [True])], 0.0)
        if not early:
            kv.rekey(SECRET)
        kv.check([])
        request = computed(kv, [1, 2, 3, 4, 5])
        assert len(request.nodes) == 2
        return kv.changes(Mark()).added

    assert digests(early=True) == digests(early=False)
