"""Numbers of ranks that work."""

from __future__ import annotations

import pytest

from optkit.errors import UserError
from optkit.graph.ir import GraphMeta
from optkit.graph.states import KVSpec, RecurrentSpec
from optkit.parallel.sizes import check_size, check_stages, good_sizes


def meta(*heads: int, latent: bool = False) -> GraphMeta:
    specs = tuple(KVSpec(i, n, 8, 8, latent=latent) for i, n in enumerate(heads))
    return GraphMeta("llama", 10, 10, specs, "", "")


@pytest.mark.parametrize(
    ("heads", "sizes"),
    [((3,), [1, 3]), ((8,), [1, 2, 4, 8]), ((8, 4), [1, 2, 4]), ((1,), [1]), ((7, 2), [1])],
)
def test_sizes_divide_the_kv_heads_of_all_layers(heads: tuple[int, ...], sizes: list[int]) -> None:
    assert good_sizes(meta(*heads)) == sizes
    for size in range(1, 10):
        if size in sizes:
            check_size(meta(*heads), size, "here")
        else:
            with pytest.raises(UserError) as caught:
                check_size(meta(*heads), size, "here")
            assert caught.value.where == "here"
            assert caught.value.fix == f"sizes that work: {', '.join(map(str, sizes))}"


def test_latent_kv_has_one_size() -> None:
    check_size(meta(4, latent=True), 1, "here")
    with pytest.raises(UserError, match="latent KV"):
        check_size(meta(4, latent=True), 2, "here")


def test_stages_are_at_most_the_layers_with_kv_and_keep_no_recurrent_state() -> None:
    for size in (1, 2, 3):
        check_stages(meta(3, 3, 3), size, "here")
    with pytest.raises(UserError, match=r"4 stages need .* the model has 3\. use at most 3") as caught:
        check_stages(meta(3, 3, 3), 4, "here")
    assert (caught.value.where, caught.value.fix) == ("here", "use at most 3")
    states = (KVSpec(0, 3, 8, 8), KVSpec(1, 3, 8, 8), RecurrentSpec(2, "state", (8,)))
    with pytest.raises(UserError, match="pipeline parallel does not support recurrent layers"):
        check_stages(GraphMeta("llama", 10, 10, states, "", ""), 2, "here")
