"""Native kernels as opaque operators of the compiler."""

from __future__ import annotations

from optkit.lowering.compiled.plan import region_source
from tests.lowering.compiled.test_plan import FUSED, planned
from tests.passes.test_compile import TARGET, captured


def test_opaque_operators_have_the_same_names_in_every_process():
    first, second = (region_source(planned(captured("llama", FUSED, layers=3)), TARGET) for _ in range(2))
    names = [
        sorted(str(n.target) for n in s.module.graph.nodes if n.op == "call_function")
        for s in (first, second)
    ]
    assert names[0] == names[1]
    assert any("linear_w8a8" in name for name in names[0])
