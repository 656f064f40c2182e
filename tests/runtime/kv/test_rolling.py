"""The rule of a rolling window, against a list of tokens from which whole blocks are cut; and the KV manager, whose
blocks have the right content through random histories.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from optkit.runtime.kv.manager import KVManager
from optkit.runtime.kv.prefix_cache import PrefixCache
from optkit.runtime.kv.rolling import Rolling, RollingWindow
from optkit.runtime.types import BlockCopy, EngineRequest, Request, SamplingParams


def kept(num_tokens: int, window: int, sinks: int, size: int, num_exact: int) -> list[int]:
    """The places of the tokens that the last of ``num_tokens`` tokens sees: blocks are cut behind the sinks, as long as
    the window stays whole.
    """
    places = list(range(num_tokens))
    if num_tokens <= num_exact:
        return places
    while len(places) - sinks - size >= window:
        del places[sinks : sinks + size]
    return places


SIZES = st.integers(1, 7)


@st.composite
def rules(draw: st.DrawFn) -> Rolling:
    size = draw(SIZES)
    chosen = RollingWindow(draw(st.integers(1, 20)), draw(st.integers(0, size)))
    return Rolling.of(chosen, size, draw(st.integers(1, 60)), draw(st.integers(20, 60)))


@given(rules(), st.integers(0, 150))
def test_a_token_sees_the_sinks_and_the_window(rule: Rolling, position: int) -> None:
    wanted = kept(position + 1, rule.window, rule.sinks, rule.block_size, rule.num_exact)
    count = rule.forgotten(position)
    assert count % rule.block_size == 0
    assert wanted == [
        *range(rule.sinks),
        *range(count + rule.sinks, position + 1),
    ] or wanted == list(range(position + 1))
    assert len(wanted) == position + 1 - count


@given(rules(), st.integers(0, 150))
def test_the_next_change_is_the_first_position_that_forgets_more(rule: Rolling, position: int) -> None:
    now = rule.forgotten(position)
    wanted = next(later for later in range(position + 1, position + 200) if rule.forgotten(later) > now)
    assert rule.next_change(position) == wanted
    assert rule.forgotten(wanted - 1) == now


@given(rules(), st.integers(0, 150))
def test_no_sequence_holds_more_than_its_exact_tokens(rule: Rolling, position: int) -> None:
    assert position + 1 - rule.forgotten(position) <= rule.num_exact


def test_a_prompt_within_the_context_is_read_whole_and_a_longer_one_through_the_window() -> None:
    chosen = RollingWindow(8, 2)
    assert Rolling.of(chosen, 4, num_prompt=63, max_model_len=64).num_exact == 63
    assert Rolling.of(chosen, 4, num_prompt=64, max_model_len=64).num_exact == 13
    assert Rolling.of(chosen, 4, num_prompt=3, max_model_len=64).num_exact == 13


# -- the KV manager ------------------------------------------------------------------------------------------

CONTEXT = 24
WINDOWS = (None, RollingWindow(5, 1), RollingWindow(4, 0), RollingWindow(7, 3), RollingWindow(1, 2))
Content = tuple[Any, ...]


class Blocks(RuleBasedStateMachine):
    """Requests with and without a window share blocks, and each reads what was written for its tokens.

    The content of a slot says from what the KV was computed: the tokens up to there, where all were seen; else the
    request, the place, and the forgotten tokens. ``ahead`` are blocks for guesses.
    """

    @initialize(size=st.integers(3, 4), blocks=st.integers(10, 24), host=st.sampled_from([0, 4]))
    def begin(self, size: int, blocks: int, host: int) -> None:
        self.size = size
        self.kv = KVManager(
            blocks, size, PrefixCache(size), num_host_blocks=host, max_pinned_blocks=blocks // 3
        )
        self.slots: list[list[Content]] = [[()] * size for _ in range(blocks)]
        self.host: dict[int, list[Content]] = {}
        self.running: list[Request] = []
        self.total = 0

    @rule(
        cut=st.integers(0, 30),
        tail=st.lists(st.integers(0, 2), min_size=1, max_size=9),
        window=st.sampled_from(WINDOWS),
    )
    def add(self, cut: int, tail: list[int], window: RollingWindow | None) -> None:
        """A prompt that begins as others do."""
        self.total += 1
        ids = [*[n % 5 for n in range(cut)], *tail]
        received = EngineRequest(
            request_id=f"r{self.total}",
            prompt_ids=tuple(ids),
            sampling=SamplingParams(max_tokens=99),
            arrival=0.0,
            rolling=window,
        )
        request = Request(received, ids)
        if window:
            request.rule = Rolling.of(window, self.size, len(ids), CONTEXT)
        self._admit(request)

    def _admit(self, request: Request) -> None:
        before = self.kv.blocks.num_available
        if self.kv.admit(request, len(request.token_ids)):
            self.running.append(request)
            self._copy()
            self._read(request)
        else:
            assert self.kv.blocks.num_available == before and not request.block_tables

    @precondition(lambda self: self.running)
    @rule(data=st.data(), most=st.integers(1, 12), ahead=st.integers(0, 3))
    def step(self, data: st.DataObject, most: int, ahead: int) -> None:
        """Compute some tokens of a request; an answer grows by one."""
        request = data.draw(st.sampled_from(self.running))
        self.kv.roll(request)
        count = min(len(request.token_ids) - request.num_computed, most, request.until_change)
        ahead = min(ahead, request.until_change - count)
        grown = self.kv.grow(request, request.num_computed + count + ahead, 0)
        self._copy()
        if not grown:
            self._leave(request)
            self._admit(request)
            return
        (table,) = request.block_tables
        for at, _ in enumerate(request.sinks):
            self.slots[table[0]][at] = ("sink", at, request.num_forgotten)
        request.stale_sinks = False
        for place in range(request.num_computed, request.num_computed + count):
            block, at = divmod(place - request.num_forgotten, self.size)
            self.slots[table[block]][at] = self._content(request, place)
        request.num_computed += count
        self._read(request)
        if request.num_computed == len(request.token_ids):
            request.token_ids.append(len(request.token_ids) % 3)
        self.kv.trim(request)
        self.kv.publish(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), again=st.booleans())
    def end(self, data: st.DataObject, again: bool) -> None:
        """A request ends, or is preempted and begins again."""
        request = data.draw(st.sampled_from(self.running))
        self._leave(request)
        if again:
            self._admit(request)

    @rule()
    def reset(self) -> None:
        self.kv.reset()

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.kv.release(request)

    def _copy(self) -> None:
        """Make the copies that come before the next step."""
        for copy in self.kv.take_transfers():
            if isinstance(copy, BlockCopy):
                self.slots[copy.to] = list(self.slots[copy.source])
            elif copy.save:
                self.host[copy.host_block] = list(self.slots[copy.block])
            else:
                self.slots[copy.block] = list(self.host[copy.host_block])

    def _content(self, request: Request, place: int) -> Content:
        if request.rule is None or place < request.rule.num_exact:
            return tuple(request.token_ids[: place + 1])
        return request.request_id, place, request.rule.forgotten(place)

    def _read(self, request: Request) -> None:
        """Compare what the next token of ``request`` sees with what was written."""
        (table,), sinks = request.block_tables, request.rule.sinks if request.rule else 0
        held = [self.slots[block][at] for block in table for at in range(self.size)][: request.num_held]
        wanted = [
            self._content(request, place) for place in range(request.num_forgotten, request.num_computed)
        ]
        if request.num_forgotten:
            wanted[:sinks] = [("sink", at, request.num_forgotten) for at in range(sinks)]
        assert held == wanted

    @invariant()
    def consistent(self) -> None:
        """No block is lost or owned twice, and a request with a window holds no more blocks than its window has."""
        self.kv.check(self.running)
        for request in self.running:
            if request.rule and request.num_forgotten:
                assert len(request.block_tables[0]) <= self.kv.blocks.blocks_for(request.rule.most_seen)
                assert not request.sink_blocks


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
