"""What requests leave for others: of each salt alone, and not without end."""

from __future__ import annotations

from optkit.runtime.sampling.shared_text import MOST_SALTS, EarlierAnswers, SharedTexts


def test_old_answers_are_forgotten() -> None:
    earlier = EarlierAnswers(4)
    for number in range(10):
        earlier.add([number, number + 100, number + 200])

    def known(number: int) -> bool:
        return any(text.find([number, number + 100]) for text in earlier.texts)

    assert [known(number) for number in range(10)] == [False] * 6 + [True] * 4
    nothing = EarlierAnswers(0)
    nothing.add([1, 2, 3])
    assert not any(text.ids for text in nothing.texts)


def test_each_salt_has_sources_of_its_own_and_the_last_used_stay() -> None:
    shared = SharedTexts(4)
    first = shared.of("a")
    first.recycled.add([1, 2], (3,))
    assert shared.of("b").recycled.after((1, 2)) == (0, ())
    for number in range(3 * MOST_SALTS):
        assert shared.of("a") is first  # used again and again
        shared.of(f"tenant {number}")
    for number in range(MOST_SALTS):
        shared.of(f"other {number}")
    assert shared.of("a") is not first
