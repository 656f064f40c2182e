"""The cases of attention, its cache and sampling, at tiny shapes in the interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bench.gpu.case import Case
from bench.gpu.cases import attention, rope_kv, sampling
from optkit.kernels.triton import available, selection

pytestmark = [
    pytest.mark.skipif(not available(), reason="Triton is not installed"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
CPU = torch.device("cpu")
TINY = [case for module in (attention, rope_kv, sampling) for case in module.cases(tiny=True)]


@pytest.mark.parametrize("case", TINY, ids=lambda c: f"{c.op}-{c.kernel}-{c.dtype}-{c.shape}")
def test_cases_are_right(case: Case) -> None:
    with CPU:
        inputs = case.make(CPU, torch.Generator(CPU).manual_seed(1))
        got, exact = case.run(*inputs), case.reference(*inputs)
    for g, e in zip(*((r,) if isinstance(r, Tensor) else r for r in (got, exact)), strict=True):
        assert g.shape == e.shape
        error = (g.double() - e.double()).abs().max() / e.double().abs().max()
        assert error <= case.tolerance, float(error)


def test_published_times_are_gated_where_the_goals_say() -> None:
    gated = [case for case in attention.cases() if case.most]
    prefills = [case for case in gated if case.most == attention.MAX_PREFILL]
    assert len(prefills) == 3 * len(attention.PREFILL_US)
    assert len(gated) - len(prefills) == sum(map(len, attention.DECODE_US.values()))
    (case,) = [c for c in prefills if c.shape == "prefill 2048, 32/32 heads, d128"]
    assert case.flops == pytest.approx(34.4e9, rel=0.01) and case.published_us == 93
    (case,) = [c for c in gated if c.shape == "decode 4096, bs 8, 32/8 heads, d128"]
    assert case.bytes == pytest.approx(8 * 4096 * 8 * 128 * 2 * 2, rel=0.01)


def test_a_table_can_be_made_of_the_prompts() -> None:
    """Of a vendor that is slower at 128 tokens and faster from 256 on."""
    found = [
        attention.timing(case, 1.0 if (case.kernel == "sdpa") == ("prefill 128" not in case.shape) else 2.0)
        for case in attention.cases()
    ]
    table = selection.measured([timing for timing in found if timing], "sm_90", "a test")
    assert len(table["layers"]) == len(attention.PREFILL_US)
    assert all(layer["best"] == [[181, "triton"], [None, "sdpa"]] for layer in table["layers"])
