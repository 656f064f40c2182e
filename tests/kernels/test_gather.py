"""Embedding, selection of rows and addition in programs give the bits of torch."""

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
