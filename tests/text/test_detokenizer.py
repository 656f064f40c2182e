from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from optkit.text.detokenizer import REPLACEMENT, Detokenizer, StopStrings
from tests.support.tiny_tokenizer import fast_tokenizer, tiny_tokenizer

ALPHABET = "ab é€😀\n日本"


def decode(ids: list[int]) -> str:
    return fast_tokenizer().decode(ids, skip_special_tokens=True)


def pieces(groups: list[list[int]]) -> list[str]:
    detokenizer = Detokenizer(decode)
    return [detokenizer.push(group) for group in groups]


@settings(deadline=None)
@given(st.text(max_size=120))
def test_any_text_comes_out_whole_and_never_broken(text: str) -> None:
    if text.endswith(REPLACEMENT):
        text += "."
    ids = tiny_tokenizer().encode(text)
    out = pieces([[token] for token in ids])
    assert "".join(out) == decode(ids) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in out)


@settings(deadline=None)
@given(st.lists(st.integers(0, 301), max_size=400), st.integers(1, 5))
def test_any_ids_give_what_decode_gives(ids: list[int], size: int) -> None:
    out = "".join(pieces([ids[at : at + size] for at in range(0, len(ids), size)]))
    whole = decode(ids)
    assert whole.startswith(out)
    assert len(whole) - len(out) <= 3
    assert set(whole[len(out) :]) <= {REPLACEMENT}


def test_long_broken_text_still_streams() -> None:
    """Ids that never form a character, as a random model emits them, must not be held back for ever."""
    lone = fast_tokenizer().encode("é").ids[0]
    out = pieces([[lone]] * 600)
    assert len("".join(out)) >= 597
    assert out[10]


def test_each_character_comes_with_its_last_byte() -> None:
    ids = tiny_tokenizer().encode("😀é")
    assert [piece for piece in pieces([[token] for token in ids]) if piece] == ["😀", "é"]


def feed(stops: list[str], parts: list[str]) -> tuple[str, StopStrings]:
    checker = StopStrings(stops)
    out = ""
    for part in parts:
        out += checker.push(part)
        if checker.matched is not None:
            return out, checker
    return out + checker.flush(), checker


@given(
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.text("abc", max_size=3), max_size=20),
)
def test_stop_strings_end_text_at_the_first_match_however_it_is_cut(
    stops: list[str], parts: list[str]
) -> None:
    out, checker = feed(stops, parts)
    whole = "".join(parts)
    if checker.matched is None:
        assert out == whole
        assert not any(stop in whole for stop in stops)
    else:
        assert whole.startswith(out + checker.matched)
        assert not any(stop in out for stop in stops)


@given(st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4), st.text("abc", max_size=40))
def test_no_prefix_of_a_match_leaks(stops: list[str], text: str) -> None:
    """Character by character, what is out never runs into the earliest match."""
    out, checker = feed(stops, list(text))
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert out == text
    else:
        assert checker.matched is not None
        assert len(out) + len(checker.matched) == min(ends)


def test_a_false_start_is_given_back() -> None:
    assert feed(["<end>"], ["a <e", "n", "ds"])[0] == "a <ends"
    assert feed(["<end>"], ["a <e", "n", "d> b"])[0] == "a "
