"""Embedding, selection of rows, sums, products and quotients in programs give the bits of torch."""

from __future__ import annotations

import pytest
import torch

from optkit.kernels.cpu import gather, native
from optkit.kernels.cpu.call_list import LOGITS, TOKENS
from optkit.kernels.cpu.program import Builder
from tests.kernels.test_program import run

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_embedding_is_the_row_of_each_id(tokens: int) -> None:
    b, table = Builder(), torch.randn(10, 24)
    (rows,) = gather.emit_embedding(b, table, b.input(TOKENS, (), torch.int64))
    assert rows is not None and rows.shape == (24,)
    b.output(rows)
    ids = torch.randint(0, 10, (tokens,))
    (out,) = run(b.build(), tokens, ids)
    assert torch.equal(out, table[ids])


def test_select_rows_reads_every_row_of_the_batch_and_no_further() -> None:
    b = Builder()
    x, index = b.input(TOKENS, (3, 8), torch.float32), b.input(LOGITS, (), torch.int64)
    (rows,) = gather.emit_select_rows(b, x, index)
    assert rows is not None
    b.output(rows)
    program, values, chosen = b.build(), torch.randn(6, 3, 8), torch.tensor([5, 0, 5, 2])
    (out,) = run(program, 6, values, chosen, logits=4)
    assert torch.equal(out, values[chosen])
    with pytest.raises(IndexError):
        run(program, 5, values[:5], chosen, logits=4)


def test_add_takes_rows_at_any_distance() -> None:
    b = Builder()
    x, y = b.input(TOKENS, (32,), torch.float32), b.input(TOKENS, (48,), torch.float32)
    (out,) = gather.emit_add(b, x, y.split([16, 32])[1])
    assert out is not None
    b.output(out)
    left, right = torch.randn(7, 32), torch.randn(7, 48)
    (total,) = run(b.build(), 7, left, right)
    assert torch.equal(total, left + right[:, 16:])


@pytest.mark.parametrize("number", [0.1, -3, 1e-30, 11.313708])
@pytest.mark.parametrize("name", ["add", "multiply"])
def test_a_number_is_rounded_as_by_torch(name: str, number: float) -> None:
    b = Builder()
    x = b.input(TOKENS, (48,), torch.float32)
    (out,) = (gather.emit_add if name == "add" else gather.emit_multiply)(b, x, number)
    assert out is not None
    b.output(out)
    values = torch.randn(7, 48)
    (found,) = run(b.build(), 7, values)
    assert torch.equal(found, values + number if name == "add" else values * number)


def test_a_weight_of_one_number_is_read_by_all_channels() -> None:
    b = Builder()
    scale = torch.tensor(0.3)
    (out,) = gather.emit_multiply(b, b.input(TOKENS, (24,), torch.float32), scale)
    assert out is not None
    b.output(out)
    values = torch.randn(5, 24)
    (found,) = run(b.build(), 5, values)
    assert torch.equal(found, values * scale)


@pytest.mark.parametrize("number", [16, 0.25, -8.0])
def test_a_quotient_by_a_power_of_two_is_exact(number: float) -> None:
    b = Builder()
    (out,) = gather.emit_divide(b, b.input(TOKENS, (24,), torch.float32), number)
    assert out is not None
    b.output(out)
    values = torch.cat([torch.randn(4, 24), torch.full((1, 24), 1e-40)])  # subnormal numbers, too
    (found,) = run(b.build(), 5, values)
    assert torch.equal(found, values / number)


@pytest.mark.parametrize("number", [3, 0.0, 1e39, 2.0**127, float("inf")])
def test_other_quotients_stay_with_torch(number: float) -> None:
    assert not gather.has_exact_reciprocal(number)
    b = Builder()
    with pytest.raises(NotImplementedError):
        gather.emit_divide(b, b.input(TOKENS, (24,), torch.float32), number)
