"""What decode steps in one native call must never be given; tests/runtime/test_multi_step.py compares their tokens."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from optkit.kernels.cpu import native
from optkit.kernels.cpu.call_list import CallList, CallPlan
from optkit.kernels.cpu.decode_steps import Choice, Outlet, Steps, TokenPairs, decode

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))

V = 40
NOTHING = CallPlan(((0, 0),), (32, 64), (0, 0), 0, num_inputs=0, num_outputs=0, weight_bytes=0, made_for=())
TABLES = [("slot_mapping", "block_tables")]


def batch(lengths: list[int], width: int) -> dict[str, np.ndarray]:
    """The inputs of sequences of ``lengths`` tokens, the new ones among them."""
    count = len(lengths)
    return {
        "input_ids": np.full(count, 7, np.int64),
        "positions": np.array(lengths, np.int64) - 1,
        "seq_lens": np.array(lengths, np.int32),
        "slot_mapping": np.zeros(count, np.int64),
        "block_tables": np.arange(100, 100 + count * width, dtype=np.int32).reshape(count, width),
    }


def choice(steps: int, count: int, stops: tuple[int, ...] = ()) -> Choice:
    return Choice([(0.0, 0, 1.0, 0.0)] * count, np.zeros((steps, count)), [stops] * count)


def logits_of(tokens: list[int]) -> np.ndarray:
    return np.eye(V, dtype=np.float32)[tokens]


def run(steps: int, lengths: list[int], width: int, **changes: object) -> np.ndarray:
    """Decode steps of a program without calls, whose logits never change."""
    count = len(lengths)
    arguments = {
        "logits": logits_of([3, 5][:count]), "batch": batch(lengths, width), "tables": TABLES,
        "choice": choice(steps, count), "outlet": Outlet(),
    } | changes  # fmt: skip
    return decode(CallList(NOTHING, b"", b""), (count, count, count, width, 4), **arguments)  # type: ignore[arg-type]


def test_tokens_become_the_inputs_of_the_next_step() -> None:
    inputs = batch([3, 8], 3)
    tokens = run(4, [3, 8], 3, batch=inputs)
    assert tokens.tolist() == [[3, 5]] * 4
    assert inputs["input_ids"].tolist() == [3, 5]
    assert inputs["positions"].tolist() == [5, 10]
    assert inputs["seq_lens"].tolist() == [6, 11]
    assert inputs["slot_mapping"].tolist() == [101 * 4 + 1, 105 * 4 + 2]  # of the tokens at places 5 and 10


@pytest.mark.parametrize("stops", [(5,), (9, 3), (1, 2)])
def test_steps_end_after_a_token_that_stops(stops: tuple[int, ...]) -> None:
    ends = bool({3, 5} & set(stops))
    assert len(run(4, [3, 8], 3, choice=choice(4, 2, stops))) == (1 if ends else 4)


def pairs_of(*pairs: tuple[int, int]) -> TokenPairs:
    made = TokenPairs()
    made.add_all(pairs)
    return made


@pytest.mark.parametrize(
    ("first", "second", "steps"),
    [
        ([(7, 3)], [], 1),  # the last token known before, and the first new one
        ([(3, 3)], [], 2),
        ([(3, 7), (5, 5), (7, 5)], [], 4),  # of another order, and of the other sequence
        ([], [(5, 5)], 2),
        ([(1, 2)], [(7, 5)], 1),
        ([], [], 4),
    ],
)
def test_steps_end_after_a_watched_pair(
    first: list[tuple[int, int]], second: list[tuple[int, int]], steps: int
) -> None:
    sets = [[pairs_of(), pairs_of(*first)], [pairs_of(*second)]]
    assert len(run(4, [3, 8], 3, choice=replace(choice(4, 2), pairs=sets))) == steps


def test_pairs_that_were_added_are_in_the_set_and_few_others() -> None:
    numbers = np.random.default_rng(0).integers(0, 1 << 20, (4000, 2)).tolist()
    made = pairs_of(*map(tuple, numbers[:2000]))
    assert all(tuple(pair) in made for pair in numbers[:2000])
    assert sum(tuple(pair) in made for pair in numbers[2000:]) < 60  # some 15 by chance


def test_a_step_without_a_token_is_not_counted() -> None:
    logits = logits_of([3, 5])
    logits[1] = np.nan
    assert len(run(4, [3, 8], 3, logits=logits)) == 0


def test_each_step_draws_with_a_number_of_its_own() -> None:
    flat = np.zeros((1, V), np.float32)
    numbers = np.array([[0.01], [0.5], [0.99]])
    drawn = Choice([(1.0, 0, 1.0, 0.0)], numbers, [()])
    assert run(3, [3], 2, logits=flat, choice=drawn)[:, 0].tolist() == [0, 20, 39]


def test_the_structure_has_the_size_of_the_one_in_c() -> None:
    """decode_steps.h asserts 23 words."""
    assert ctypes.sizeof(Steps) == 23 * 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"choice": choice(0, 2)}, "there must be steps"),
        ({"choice": choice(10, 2)}, "17 tokens need more than 3 blocks of 4"),
        ({"choice": choice(2, 3)}, "uniforms must be"),
        ({"choice": replace(choice(2, 2), stops=[()])}, "must be of 2 sequences"),
        ({"choice": replace(choice(2, 2), parameters=[])}, "must be of 2 sequences"),
        ({"choice": replace(choice(2, 2), pairs=[[TokenPairs()]])}, "pairs must be of 2 sequences"),
        ({"logits": logits_of([3])}, "must be of 2 sequences"),
        ({"logits": logits_of([3, 5]).astype(np.float64)}, "dense array of float32"),
        ({"batch": batch([3, 8, 9], 3)}, "input_ids must be"),
        ({"batch": batch([3, 8], 2)}, "block_tables must be"),
        ({"outlet": Outlet(watched=tuple(range(9)))}, "at most 8 descriptors"),
        ({"outlet": Outlet(sink=1, frame=b"12345678", places=(0,))}, "2 places"),
        ({"outlet": Outlet(sink=1, frame=b"12345678", places=(0, 5))}, "2 places"),
        ({"outlet": Outlet(sink=1, frame=b"12345678", places=(-1, 4))}, "2 places"),
    ],
)
def test_what_native_code_would_misread_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(2, [3, 8], 3, **changes)
