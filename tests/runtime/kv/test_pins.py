"""Pins hold blocks through any pressure; the random histories of tests/support/histories.py pin and unpin, too."""

from __future__ import annotations

import pytest

from optkit.runtime.kv.manager import KVManager
from optkit.runtime.kv.pins import PinRefused
from optkit.runtime.kv.prefix_cache import PrefixCache
from optkit.runtime.prefill import TOO_MANY_PINS
from optkit.runtime.types import EngineRequest, Request, SamplingParams

SIZE = 2


def manager(num_blocks: int = 20, windows: tuple[int, ...] = (0,), most: int = 10) -> KVManager:
    cache = PrefixCache(SIZE, num_groups=len(windows))
    return KVManager(num_blocks, SIZE, cache, windows=windows, tokens_in_flight=8, max_pinned_blocks=most)


def request(ids: list[int], salt: str = "t:") -> Request:
    params = SamplingParams(max_tokens=1)
    received = EngineRequest(
        request_id="r", prompt_ids=tuple(ids), sampling=params, arrival=0.0, cache_salt=salt
    )
    return Request(received, list(ids))


def computed(kv: KVManager, ids: list[int], salt: str = "t:") -> Request:
    """A request whose prompt has KV but for the last token."""
    made = request(ids, salt)
    assert kv.admit(made, len(ids))
    while made.num_computed < len(ids) - 1:
        stop = min(made.num_computed + 8, len(ids) - 1)
        assert kv.cover(made, stop)
        made.num_computed = stop
        kv.publish(made)
    return made


def pin(
    kv: KVManager, name: str, ids: list[int], end: float | None = None, now: float = 0.0, most: int = 99
) -> int:
    made = computed(kv, ids)
    try:
        return kv.pin(name, made, now, end, most)
    finally:
        kv.release(made)
        kv.check([])


def flood(kv: KVManager) -> None:
    """Take and free every block that is available."""
    table: list[int] = []
    assert kv.blocks.extend(table, kv.blocks.num_available * SIZE)
    kv.blocks.free(table)
    kv.check([])


PROMPT = list(range(100, 109))  # four blocks, and a token


def test_a_pinned_prefix_survives_what_evicts_another() -> None:
    kv = manager()
    assert pin(kv, "a", PROMPT) == 8
    other = computed(kv, [*range(50, 59)])
    kv.release(other)
    flood(kv)
    assert kv.cached_tokens(request(PROMPT)) == 8 and kv.cached_tokens(request([*range(50, 59)])) == 0
    kv.reset()
    assert kv.cached_tokens(request(PROMPT)) == 8
    assert kv.pins.drop("a") and not kv.pins.drop("a")
    flood(kv)
    assert kv.cached_tokens(request(PROMPT)) == 0 and kv.blocks.num_used == 0


def test_pins_count_shared_blocks_once_and_are_bounded() -> None:
    kv = manager(most=6)
    assert pin(kv, "a", PROMPT) == 8
    assert pin(kv, "b", [*PROMPT[:8], 1, 2, 3]) == 10 and kv.pins.num_blocks == 5
    with pytest.raises(PinRefused):
        pin(kv, "c", [7] * 9)
    assert pin(kv, "b", [1, 2, 3]) == 2 and kv.pins.num_blocks == 5  # in the place of the longer one
    with pytest.raises(PinRefused):
        pin(kv, "d", [4] * 5, most=6)
    kv.check([])


def test_the_oldest_lease_gives_way_and_a_pin_does_not() -> None:
    kv = manager(most=8)
    pin(kv, "old", [1] * 5, end=10.0)
    pin(kv, "young", [2] * 5, end=20.0)
    pin(kv, "kept", [3] * 5)
    assert pin(kv, "new", [4] * 7) == 6
    assert {each.name for each in kv.pins} == {"young", "kept", "new"}
    kv.pins.expire(19.0)
    assert {each.name for each in kv.pins} == {"young", "kept", "new"}
    kv.pins.expire(20.0)
    assert {each.name for each in kv.pins} == {"kept", "new"}


def test_a_pin_in_a_window_holds_the_end_of_the_prefix() -> None:
    kv = manager(40, windows=(0, 5), most=30)
    ids = list(range(100, 121))
    assert pin(kv, "a", ids) == 20
    held = 10 + 3  # all blocks without a window; of the window those read from position 20 on
    assert kv.pins.num_blocks <= held + 1
    flood(kv)
    assert kv.cached_tokens(request([*ids[:20], 7, 8])) == 20
    assert kv.cached_tokens(request([*ids[:10], 7, 8])) == 0  # the window there is lost
    kv.check([])


def test_a_failure_drops_pins_of_the_tenant_and_none_of_the_artifact() -> None:
    kv = manager()
    kv.adopt("artifact:x", [((1, 2), [True]), ((3, 4), [True])], now=0.0)
    assert pin(kv, "a", [1, 2, 3, 4, 5, 6, 7]) == 6
    failed = computed(kv, [1, 2, 3, 4, 5, 6, 7])
    kv.distrust(failed)
    kv.release(failed)
    assert [each.name for each in kv.pins] == ["artifact:x"]
    assert kv.cached_tokens(request([1, 2, 3, 4, 5, 6, 7])) == 4
    kv.check([])


def test_kv_that_the_tree_lost_is_not_pinned() -> None:
    """Two requests compute the same blocks; the tree has those of the first, which are evicted."""
    kv = manager(10, most=10)
    first, second = request(PROMPT), request(PROMPT)
    assert kv.admit(first, len(PROMPT)) and kv.admit(second, len(PROMPT))
    for each in (first, second):
        each.num_computed = 8
        kv.publish(each)
    kv.release(first)
    second.token_ids += [7, 8, 9]
    assert kv.grow(second, 12, 12)
    table: list[int] = []
    assert kv.blocks.extend(table, kv.blocks.num_available * SIZE)
    second.num_computed = 10
    kv.publish(second)
    told = kv.pin("a", second, 0.0, None, 99)
    kv.blocks.free(table)
    kv.release(second)
    assert kv.cached_tokens(request([*PROMPT, 7, 8, 9])) >= told
    flood(kv)
    assert kv.cached_tokens(request([*PROMPT, 7, 8, 9])) == told == kv.pins.num_blocks * SIZE


def test_leases_go_one_by_one_and_shared_blocks_count_once() -> None:
    kv = manager(40, most=12)
    pin(kv, "a", [1, 1, 2, 2, 9], end=1.0)  # 2 blocks
    pin(kv, "b", [1, 1, 2, 2, 3, 3, 9], end=2.0)  # one more
    pin(kv, "c", [4] * 13, end=3.0)  # 6 more: 9
    assert kv.pins.num_blocks == 9
    pin(kv, "d", [5] * 11)  # 5 more; "a" alone frees nothing, "b" frees three
    assert [each.name for each in kv.pins] == ["c", "d"] and kv.pins.num_blocks == 11
    with pytest.raises(PinRefused):
        pin(kv, "e", [6] * 29)
    assert [each.name for each in kv.pins] == ["c", "d"]  # a pin in vain ends none


def test_the_number_of_pins_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pins of the same blocks take no block, but names, lists, and time in each step."""
    monkeypatch.setattr("optkit.runtime.kv.pins.MAX_PINS", 3)
    kv = manager()
    for name in ("a", "b"):
        pin(kv, name, PROMPT)
    pin(kv, "lease", PROMPT, end=10.0)
    pin(kv, "c", PROMPT)
    assert [each.name for each in kv.pins] == ["a", "b", "c"]
    with pytest.raises(PinRefused, match=TOO_MANY_PINS):
        pin(kv, "d", PROMPT)
    pin(kv, "b", [*range(50, 55)])  # in the place of the earlier one
    assert [each.name for each in kv.pins] == ["a", "c", "b"]


def test_a_window_shares_no_block_with_a_pin_for_long() -> None:
    kv = manager(60, windows=(0, 5), most=30)
    ids = list(range(100, 121))
    pin(kv, "a", ids)
    longer = request([*ids[:20], *range(8)])
    assert kv.pinned_blocks(longer) == 10  # without those of the window
    assert kv.pinned_blocks(request([*ids[:10], *range(8)])) == 0  # no pin ends there


def test_a_checkpoint_that_may_be_lost_is_not_counted_on() -> None:
    cache = PrefixCache(SIZE)
    kv = KVManager(60, SIZE, cache, num_state_slots=2, num_checkpoints=4, max_pinned_blocks=30)
    ids = list(range(100, 121))
    assert pin(kv, "a", ids) == 20
    other = request([*ids[:10], 7, 8, 9])
    assert kv.admit(other, 20) and other.borders == (10, 12)
    other.num_computed = 10
    kv.publish(other)  # takes a checkpoint in the middle of the pinned prefix
    kv.release(other)
    asked = request([*ids[:10], 1, 2, 3])
    assert kv.cached_tokens(asked) == 10 and kv.pinned_blocks(asked) == 0
    assert kv.pinned_blocks(request([*ids[:20], 1, 2, 3])) == 10
    kv.check([])


# -- prefixes of an artifact ---------------------------------------------------------------------------


def test_an_adopted_prefix_is_found_with_every_salt_and_nothing_behind_it_is() -> None:
    kv = manager(40, most=30)
    new = kv.adopt("artifact:x", [((1, 2), [True]), ((3, 4), [True])], now=0.0)
    assert len({place.block for place in new}) == 2 == kv.pins.num_blocks
    assert kv.adopt("artifact:y", [((1, 2), [True]), ((5, 6), [True])], now=0.0)[0].node.tokens == (5, 6)
    for salt in ("a:", "b:"):
        assert kv.cached_tokens(request([1, 2, 3, 4, 9, 9, 9], salt)) == 4
        assert kv.cached_tokens(request([1, 2, 7, 7, 7], salt)) == 2
    kv.release(computed(kv, [1, 2, 3, 4, 9, 9, 9, 9, 9], "a:"))
    assert kv.cached_tokens(request([1, 2, 3, 4, 9, 9, 9, 9, 9], "a:")) == 8
    assert kv.cached_tokens(request([1, 2, 3, 4, 9, 9, 9, 9, 9], "b:")) == 4
    flood(kv)
    assert kv.cached_tokens(request([1, 2, 3, 4, 9, 9, 9, 9, 9], "a:")) == 4
    kv.check([])


def test_an_adopted_prefix_without_room_leaves_nothing() -> None:
    kv = manager(most=1)
    for most in (1, 40):
        kv = manager(num_blocks=2 if most == 40 else 20, most=most)
        with pytest.raises(PinRefused):
            kv.adopt("artifact:x", [((1, 2), [True]), ((3, 4), [True]), ((5, 6), [True])], now=0.0)
        kv.check([])
        assert kv.blocks.num_used == 0 and kv.cache is not None and not len(kv.cache)


def test_an_adopted_prefix_behind_a_window() -> None:
    kv = manager(40, windows=(0, 3), most=30)
    path = [((1, 2), [True, False]), ((3, 4), [True, True]), ((5, 6), [True, True])]
    kv.adopt("artifact:x", path, now=0.0)
    assert kv.cached_tokens(request([1, 2, 3, 4, 5, 6, 7])) == 6
    admitted = request([1, 2, 3, 4, 5, 6, 7])
    assert kv.admit(admitted, 8) and admitted.num_computed == 6
    kv.check([admitted])


def test_a_refused_prefix_takes_nothing_from_another() -> None:
    """The second prefix needs the window's KV of a node that the first one has without."""
    kv = manager(40, windows=(0, 3), most=7)
    first = [((1, 2), [True, False]), ((3, 4), [True, True]), ((5, 6), [True, True])]
    kv.adopt("artifact:x", first, now=0.0)
    used, nodes = kv.blocks.num_used, len(kv.cache or ())
    second = [((1, 2), [True, True]), ((9, 9), [True, True]), ((8, 8), [True, True])]
    with pytest.raises(PinRefused):
        kv.adopt("artifact:y", second, now=0.0)
    assert (kv.blocks.num_used, len(kv.cache or ())) == (used, nodes)
    assert [each.name for each in kv.pins] == ["artifact:x"]
    assert kv.cached_tokens(request([1, 2, 3, 4, 5, 6, 7])) == 6
    kv.check([])


def test_a_prompt_that_ends_with_the_prefix_hides_none_of_it() -> None:
    """Its last block is computed again, since the logits are needed; requests behind go on from the artifact's."""
    kv = manager(40, most=30)
    kv.adopt("artifact:x", [((1, 2), [True]), ((3, 4), [True])], now=0.0)
    kv.release(computed(kv, [1, 2, 3, 4, 7], "a:"))
    whole = request([1, 2, 3, 4], "a:")
    assert kv.admit(whole, 8) and whole.num_computed == 2
    whole.token_ids += [5, 6, 7]
    assert kv.grow(whole, 7, 8)
    whole.num_computed = 6
    kv.publish(whole)
    kv.check([whole])
    assert [kv.cache is not None and kv.cache.is_common(node) for node in whole.nodes] == [True, True, False]
    kv.release(whole)
    assert kv.cached_tokens(request([1, 2, 3, 4, 5, 6, 9], "a:")) == 6
    assert kv.cached_tokens(request([1, 2, 3, 4, 5, 6, 9], "b:")) == 4
    kv.check([])
