"""The rule of a rolling window, against a list of tokens from which whole blocks are cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from optkit.runtime.kv.rolling import Rolling, RollingWindow


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
