"""Answers within a bound on memory: a model of the store in plain Python, under random histories."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from optkit.serve.cache.store import IN_PROGRESS, MAX_SHARE, OVERHEAD, Answer, ResponseStore, Room

BOUND = 10 * (OVERHEAD + 100)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "get", "wait"]),
        st.integers(0, 14),
        st.integers(0, 400),
        st.none() | st.integers(1, 5),
    ),
    max_size=60,
)


@given(STEPS)
def test_store_is_a_list_by_last_use_within_its_bound(steps: Any) -> None:
    now = [0.0]
    store = ResponseStore(BOUND, lambda: now[0])
    model: list[tuple[bytes, bytes, float | None]] = []  # the latest used last
    for kind, name, size, ttl in steps:
        key, body = bytes([name]), bytes([name]) * size
        if kind == "wait":
            now[0] += 1
            continue
        held = next((entry for entry in model if entry[0] == key), None)
        model = [entry for entry in model if entry[0] != key]
        if kind == "put":
            store.put(key, ((b"a", b"b"),), body, ttl)
            if (OVERHEAD + 2 + size) * MAX_SHARE <= BOUND:
                model.append((key, body, None if ttl is None else now[0] + ttl))
            while sum(OVERHEAD + 2 + len(entry[1]) for entry in model) > BOUND:
                model.pop(0)
        else:
            alive = held is not None and (held[2] is None or held[2] > now[0])
            found = store.get(key)
            assert (found is not None) == alive
            if held is not None and alive:
                assert found is not None and found.body == held[1]
                model.append(held)
        assert len(store) == len(model)
        assert store.num_bytes == sum(OVERHEAD + 2 + len(entry[1]) for entry in model) <= BOUND


def test_an_answer_too_large_for_its_share_replaces_nothing_but_its_key() -> None:
    store = ResponseStore(BOUND)
    store.put(b"a", (), b"x", None)
    store.put(b"b", (), b"y", None)
    store.put(b"a", (), bytes(BOUND), None)
    assert store.get(b"a") is None and store.get(b"b") is not None
    assert Answer((), b"", 0.0).num_bytes == OVERHEAD


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 2 * BOUND // MAX_SHARE)), max_size=40))
def test_answers_in_progress_take_the_memory_of_kept_ones(steps: list[tuple[int, int]]) -> None:
    """Each has its share at most, all of them half; a closed one gives everything back."""
    store = ResponseStore(BOUND)
    for name in b"abcdefghij":
        store.put(bytes([name]), (), bytes(90), None)
    rooms, taken = [Room(store) for _ in range(4)], [0] * 4
    for index, size in steps:
        if size < 0:
            rooms[index].close()
            taken[index] = 0
        else:
            fits = (taken[index] + size) * MAX_SHARE <= BOUND and (sum(taken) + size) * IN_PROGRESS <= BOUND
            assert rooms[index].grow(size) == fits
            taken[index] += size if fits else 0
        assert store.num_bytes == len(store) * (OVERHEAD + 90) + sum(taken) <= BOUND
        assert len(store) + store.num_evictions == 10
    for room in rooms:
        room.close()
    assert store.num_bytes == len(store) * (OVERHEAD + 90)


def test_cleared_store_holds_only_what_is_in_progress() -> None:
    store = ResponseStore(4096)
    store.put(b"key", (), b"body", None)
    room = Room(store)
    assert room.grow(100)
    store.clear()
    assert (len(store), store.num_bytes, store.num_evictions) == (0, 100, 0)
    room.close()
    assert store.num_bytes == 0
