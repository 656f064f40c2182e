"""Trees of guesses: parents, children, the first branch and the moves of KV."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from optkit.runtime.draft_tree import DraftTree, Move, child, depths_of, first_branch, move_to_branch

#        root
#      5       7
#    6   8     9
#    4
TREE = DraftTree((5, 6, 4, 8, 7, 9), (1, 2, 3, 2, 1, 2))


def test_a_tuple_is_a_chain() -> None:
    assert list(depths_of((3, 4, 5))) == [1, 2, 3]
    assert first_branch((3, 4, 5)) == (3, 4, 5)
    assert [child((3, 4), 0, 3), child((3, 4), 1, 4), child((3, 4), 1, 3), child((3, 4), 2, 4)] == [
        1,
        2,
        None,
        None,
    ]
    assert first_branch(()) == ()
    assert child((), 0, 1) is None


def test_children_are_found_by_token() -> None:
    assert [child(TREE, 0, token) for token in (5, 7, 6)] == [1, 5, None]
    assert [child(TREE, 1, token) for token in (6, 8, 4, 9)] == [2, 4, None, None]
    assert [child(TREE, 2, 4), child(TREE, 4, 4), child(TREE, 5, 9), child(TREE, 6, 9)] == [3, None, 6, None]
    assert first_branch(TREE) == (5, 6, 4)
    assert type(first_branch(TREE)) is tuple


@given(st.lists(st.integers(0, 3), max_size=20), st.data())
def test_each_node_is_the_child_of_its_parent(tokens: list[int], data: st.DataObject) -> None:
    """Against a search for the parent of each row; of equal siblings the first is found."""
    depths: list[int] = []
    for _ in tokens:
        depths.append(data.draw(st.integers(1, (depths[-1] if depths else 0) + 1)))
    tree = DraftTree(tokens, depths)
    first: dict[tuple[int, int], int] = {}
    for row, (token, depth) in enumerate(zip(tokens, depths, strict=True), 1):
        parent = max((r for r in range(1, row) if depths[r - 1] == depth - 1), default=0)
        first.setdefault((parent, token), row)
    for parent in range(len(tokens) + 1):
        for token in range(4):
            assert child(tree, parent, token) == first.get((parent, token))


def test_only_rows_out_of_place_move() -> None:
    table = [9]
    assert move_to_branch(table, 10, (1, 4, 5)) == Move(table, [14, 15], [12, 13])
    assert move_to_branch(table, 0, (5, 6)) == Move(table, [5, 6], [1, 2])
