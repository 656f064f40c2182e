"""The figure of experts, at small sizes: bytes by formula against accessed bits, and what a miss looks like."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from bench.models import accessed, experts
from bench.models.random_model import captured
from optkit.kernels.cpu import weight_memory

SIZES = Namespace(layers=1, hidden=256, width=256, experts=8, top=2)


@pytest.fixture(scope="module")
def graph() -> Any:
    return captured("qwen3_moe", experts.fields(SIZES))


@pytest.mark.skipif(not accessed.is_available(), reason="this system has no accessed bits")
def test_a_token_reads_the_bytes_of_the_formula(graph: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_memory, "has_large_pages", lambda: False)
    found = experts.bytes_read(graph, SIZES)
    assert experts.missed(found) == []
    assert found["int8: bytes by formula"] < 0.4 * found["float: bytes by formula"]
    assert len(found["int8: bytes accessed"]) == experts.WATCHED_STEPS
    assert max(found["int8: bytes accessed"]) < 0.5 * found["int8: bytes of all experts"]


def test_formula_counts_scales() -> None:
    assert experts.matrix_bytes("float", 64, 64) == 4 * 64 * 64
    assert experts.matrix_bytes("int8", 64, 64) == 64 * 64 + 2 * 64 * 4
    assert experts.by_formula("float", SIZES) == 2 * 4 * (512 * 256 + 256 * 256)


def test_steps_that_read_every_expert_are_a_miss() -> None:
    found = {
        "int8: bytes by formula": 1_000_000,
        "int8: bytes accessed": [1_004_096, 4_000_000],
        "int8: pieces": 8,
        "int8: tensors": 4,
    }
    assert experts.missed(found) == ["int8: bytes accessed"]
    assert experts.missed(found | {"int8: bytes accessed": [900_000]}) == ["int8: bytes accessed"]
    assert experts.missed(found | {"int8: bytes accessed": [1_004_096] * 2}) == []
    assert experts.missed({"ratio": 1.9}) == ["ratio"]


def test_times_are_taken_of_both_sides(graph: Any) -> None:
    found = experts.times(graph, num_tokens=4, rounds=2)
    assert all(len(found["tpot"][side]) == 2 and min(found["tpot"][side]) > 0 for side in experts.SIDES)
    assert found["least ratio"] <= found["ratio"]
