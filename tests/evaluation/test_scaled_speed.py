"""The sums of short models that stand for a whole: factors, and times by a clock of the test's own."""

from __future__ import annotations

import pytest

from optkit.errors import UserError
from optkit.evaluation import scaled_speed
from optkit.evaluation.scaled_speed import fitting_terms, lower_terms, terms_of
from optkit.evaluation.short_models import ATTENTION
from optkit.evaluation.speed import Repeated, Summed
from optkit.graph.shapes import Point
from tests.support.graphs import captured
from tests.support.target import TARGET

POINT = Point(24, 1, 24)


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_terms_of_sum_to_all_layers_head_and_tail(layers: int) -> None:
    graph = captured("llama", num_hidden_layers=8)
    terms = terms_of(graph, POINT, 8, layers)
    assert sum(term.factor for term in terms) == pytest.approx(1.0)
    counts = [len(list(term.graph.calls(*ATTENTION))) for term in terms]
    assert sum(t.factor * n for t, n in zip(terms, counts, strict=True)) == pytest.approx(8)
    nodes = [len(list(term.graph.calls(*scaled_speed.variants.ops.OPS.values()))) for term in terms]
    whole = len(list(graph.calls(*scaled_speed.variants.ops.OPS.values())))
    assert sum(t.factor * n for t, n in zip(terms, nodes, strict=True)) == pytest.approx(whole)


def test_fitting_terms_take_as_many_layers_as_memory_holds() -> None:
    graph = captured("llama", num_hidden_layers=8)
    sizes = [terms_of(graph, POINT, 8, n)[1].graph.num_bytes() for n in (1, 2, 4)]
    for limit, size in ((sizes[1], sizes[1]), (sizes[2], sizes[2]), (0, sizes[0])):
        ((_, largest),) = fitting_terms([graph], POINT, 8, limit)
        assert largest.graph.num_bytes() == size


def test_terms_of_refuses_a_graph_that_cannot_be_cut() -> None:
    with pytest.raises(UserError, match="can't be measured one by one"):
        terms_of(captured("llama", num_hidden_layers=2), POINT, 8, 1)


def test_lower_terms_share_their_weights() -> None:
    terms = terms_of(captured("llama", num_hidden_layers=5), POINT, 8, 2)
    (_, ends), (_, more) = lower_terms(terms, TARGET)
    shared = {b.data_ptr() for b in ends.module.buffers()} & {b.data_ptr() for b in more.module.buffers()}
    assert len(shared) >= len(list(ends.module.buffers())) - 1


def test_summed_adds_times_with_factors_and_never_falls_below_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"ends": 2.0, "more": 5.0}
    monkeypatch.setattr(Repeated, "seconds", lambda self: seconds[self.step()])  # type: ignore[attr-defined]
    ends, more = (Repeated(lambda name=name: name, 1) for name in seconds)  # type: ignore[misc]
    assert Summed([(-1.5, ends), (2.5, more)]).seconds() == pytest.approx(9.5)
    seconds["more"] = 1.0  # a disturbance of the shorter model
    assert Summed([(-1.5, ends), (2.5, more)]).seconds() == pytest.approx(1.0)
