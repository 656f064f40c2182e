"""The checksum of KV on the wire: the sum by its definition, and damage of any kind."""

from __future__ import annotations

import random
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.fleet.checksum import MASK, ROW, WORD_BYTES, checksum, weights

SIZES = (0, 1, 7, 8, 9, 8 * ROW - 1, 8 * ROW, 8 * ROW + 1, 3 * 8 * ROW + 1237)


def by_definition(frame: bytes, data: bytes) -> int:
    """The sum word by word, in Python's integers."""
    each, rows = [int(weight) for weight in weights(ROW)], [int(weight) for weight in weights(2 * ROW)]
    whole = len(data) // WORD_BYTES
    total = zlib.crc32(frame)
    for at in range(whole):
        word = int.from_bytes(data[at * WORD_BYTES : (at + 1) * WORD_BYTES], "little")
        total += word * each[at % ROW] * rows[at // ROW]
    rest = int.from_bytes(data[whole * WORD_BYTES :], "little")
    return (total + rest * each[-1] * rows[whole // ROW]) & MASK


@pytest.mark.parametrize("size", SIZES)
def test_the_sum_is_that_of_the_definition(size: int) -> None:
    data = random.Random(size).randbytes(size)
    assert checksum(b"frame", memoryview(data)) == by_definition(b"frame", data)


def test_weights_are_odd_different_and_the_same_on_every_machine() -> None:
    found = weights(ROW)
    assert (found & np.uint64(1)).all() and len(set(found.tolist())) == ROW
    assert int(found[0]) == 0xE220A8397B1DCDAF | 1  # splitmix64 of the seed 0, as published


@given(st.sampled_from(SIZES[1:]), st.randoms(use_true_random=False), st.integers(1, 64))
def test_a_change_within_a_word_is_found(size: int, dice: random.Random, bits: int) -> None:
    original = dice.randbytes(size)
    data = bytearray(original)
    start = dice.randrange(size) // WORD_BYTES * WORD_BYTES
    for _ in range(bits):
        data[min(start + dice.randrange(WORD_BYTES), size - 1)] ^= 1 << dice.randrange(8)
    same = checksum(b"", memoryview(data)) == checksum(b"", memoryview(original))
    assert same == (data == original)


def test_words_in_another_order_are_found() -> None:
    words = np.arange(1, 3 * ROW + 1, dtype="<u8")
    sums = {checksum(b"", memoryview(np.roll(words, shift)).cast("B")) for shift in (0, 1, ROW, 2 * ROW)}
    assert len(sums) == 4


def test_a_change_of_the_frame_is_found() -> None:
    data = memoryview(bytes(100))
    assert len({checksum(frame, data) for frame in (b"", b"a", b"b", b"ab")}) == 4
