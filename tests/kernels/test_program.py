"""Programs: where buffers lie, what the builder refuses, and that a program computes what its calls do."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optkit.cancellation import StepCancelled, cancellable
from optkit.kernels import reference
from optkit.kernels.cpu import call_list, gates, gather, native, norms, program
from optkit.kernels.cpu.call_list import LOGITS, TOKENS, Blocks
from optkit.kernels.cpu.program import Buffer, Builder, Program, View, place

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))


@st.composite
def lives(draw: st.DrawFn) -> list[Buffer]:
    buffers = []
    for _ in range(draw(st.integers(0, 20))):
        born = draw(st.integers(0, 30))
        size = 64 * draw(st.integers(1, 9))
        buffers.append(Buffer(TOKENS, size, born=born, dies=born + draw(st.integers(0, 12))))
    return buffers


@given(lives())
def test_buffers_that_live_together_lie_apart(buffers: list[Buffer]) -> None:
    total = place(buffers)
    for i, a in enumerate(buffers):
        assert 0 <= a.place <= total - a.row_bytes
        for b in buffers[:i]:
            together = a.born <= b.dies and b.born <= a.dies
            apart = a.place + a.row_bytes <= b.place or b.place + b.row_bytes <= a.place
            assert apart or not together


def run(program: Program, tokens: int, *inputs: torch.Tensor, logits: int = 1) -> tuple[torch.Tensor, ...]:
    batch = (
        torch.zeros(tokens, dtype=torch.int64),
        torch.zeros(logits, dtype=torch.int64),
        torch.ones(1, dtype=torch.int32),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.zeros(1, 16, 1, 8),
    )
    return program(*batch, *inputs)


def mlp() -> tuple[Builder, View]:
    """A norm, its gated activation and the sum with the input: buffers, views and a residual."""
    b = Builder()
    x = b.input(TOKENS, (64,), torch.float32)
    normed, _, _ = norms.emit_rms_norm(b, x, None, 1e-6)
    assert normed is not None
    gated, _, _ = gates.emit_silu_mul_packed(b, normed)
    assert gated is not None
    (total,) = gather.emit_add(b, gated, x.split([32, 32])[1])
    assert total is not None
    return b, total


@pytest.mark.parametrize("tokens", [7, 1, 40, 3])
def test_computes_what_its_calls_do(tokens: int) -> None:
    b, total = mlp()
    b.output(total)
    x = torch.randn(tokens, 64)
    (out,) = run(b.build(), tokens, x)
    expected = reference.silu_mul_packed(reference.rms_norm(x, None, 1e-6)) + x[:, 32:]
    torch.testing.assert_close(out, expected)


def test_outputs_outlive_the_next_call() -> None:
    b, total = mlp()
    b.output(total)
    program = b.build()
    x = torch.randn(5, 64)
    (first,) = run(program, 5, x)
    kept = first.clone()
    run(program, 9, torch.randn(9, 64))
    assert torch.equal(first, kept)


def test_program_reads_the_tensors_of_each_call_when_they_are_kept_new_or_strided() -> None:
    b, total = mlp()
    b.output(total)
    built = b.build()
    kept, wide = torch.randn(3, 64), torch.randn(3, 128)
    for x in (kept, kept, wide[:, :64], wide[:, 64:], kept, *(torch.randn(3, 64) for _ in range(3)), kept):
        (found,) = run(built, 3, x)
        normed = reference.rms_norm(x, None, 1e-6)
        torch.testing.assert_close(found, reference.silu_mul_packed(normed) + x[:, 32:])
        kept += 1.0  # the same memory with other numbers
    for _ in range(5):  # freed memory may be given out again, to another tensor
        x = torch.randn(3, 64)
        (found,) = run(built, 3, x)
        torch.testing.assert_close(
            found, reference.silu_mul_packed(reference.rms_norm(x, None, 1e-6)) + x[:, 32:]
        )
        del x


def test_a_long_step_is_cancelled_between_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_list, "CALLS_A_PART", 1)
    monkeypatch.setattr(program, "LONGEST_RUN", 1)
    b, total = mlp()
    b.output(total)
    made, x, checks = b.build(), torch.randn(5, 64), list[int]()
    with cancellable(lambda: checks.append(1)):
        (whole,) = run(made, 5, x)
        assert not checks  # a short step is one call
        monkeypatch.setattr(call_list, "LONG_STEP", 0)
        (cut,) = run(made, 5, x)
    assert len(checks) == made.num_calls - 1 and torch.equal(whole, cut)

    def cancel() -> None:
        raise StepCancelled

    with cancellable(cancel), pytest.raises(StepCancelled):
        run(made, 5, x)
    assert torch.equal(run(made, 5, x)[0], whole)


def mlp_and_embedding() -> Builder:
    """``mlp``, and as its last call the rows of a table of ten."""
    b, total = mlp()
    b.output(total)
    ids = b.input(TOKENS, (), torch.int64)
    (rows,) = gather.emit_embedding(b, torch.randn(10, 16), ids)
    assert rows is not None
    b.output(rows)
    return b


def test_an_index_out_of_range_is_an_error_in_any_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_list, "CALLS_A_PART", 1)
    monkeypatch.setattr(call_list, "LONG_STEP", 0)
    b = mlp_and_embedding()
    with pytest.raises(IndexError, match="call 3"):
        run(b.build(), 2, torch.randn(2, 64), torch.tensor([0, 10]))


def two_runs() -> Builder:
    """A run of five calls, the rows of it that get logits, and a norm of these rows."""
    b = Builder()
    x, index = b.input(TOKENS, (64,), torch.float32), b.input(LOGITS, (), torch.int64)
    hidden = x
    for _ in range(2):
        normed, _, _ = norms.emit_rms_norm(b, hidden, None, 1e-6)
        assert normed is not None
        (hidden,) = gather.emit_add(b, normed, hidden)
        assert hidden is not None
    gated, _, _ = gates.emit_silu_mul_packed(b, hidden)
    assert gated is not None
    (rows,) = gather.emit_select_rows(b, gated, index)
    assert rows is not None
    normed, _, _ = norms.emit_rms_norm(b, rows, None, 1e-6)
    assert normed is not None
    b.output(normed)
    return b


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("tokens", [31, 64, 193, 400])
def test_blocks_of_tokens_give_the_bits_of_whole_calls(
    tokens: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(threads)
    x, index = torch.randn(tokens, 64), torch.tensor([tokens - 1, 0, tokens // 2])
    built = two_runs().build()
    assert [len(run) for run in built.calls.runs] == [5, 1, 1]
    (blocks,) = run(built, tokens, x, index, logits=3)
    hidden = x
    for _ in range(2):
        hidden = reference.rms_norm(hidden, None, 1e-6) + hidden
    torch.testing.assert_close(
        blocks, reference.rms_norm(reference.silu_mul_packed(hidden)[index], None, 1e-6)
    )
    monkeypatch.setattr(built.calls, "blocks", Blocks(least=10**9))
    (whole,) = run(built, tokens, x, index, logits=3)
    assert torch.equal(blocks, whole)


def test_buffers_of_one_run_take_the_memory_of_a_block() -> None:
    torch.set_num_threads(2)
    built = two_runs().build()
    few, many = (built.calls.workspace_bytes((tokens, 1, 1, 1, 16)) for tokens in (1000, 2000))
    plan = built.calls.plan
    assert many - few == 1000 * plan.bytes_per_row[TOKENS] and plan.block_token_bytes >= 64 * 4


@given(st.integers(1, 5000), st.integers(1, 64), st.sampled_from([(32, 64), (128, 256)]))
def test_all_threads_get_equally_many_blocks(tokens: int, threads: int, limits: tuple[int, int]) -> None:
    limit = Blocks(*limits)
    block = limit.tokens(tokens, threads)
    if block == 0:
        assert tokens < threads * limit.least
        return
    blocks = -(-tokens // block)
    assert block <= limit.most
    assert -(-blocks // threads) * block <= tokens / threads + block


@given(st.lists(st.booleans(), max_size=60))
def test_runs_are_all_calls_in_order(by_rows: list[bool]) -> None:
    runs = program.runs_of(by_rows)
    assert [call for each in runs for call in each] == list(range(len(by_rows)))
    for each in runs:
        assert len(each) == 1 or (all(by_rows[call] for call in each) and len(each) <= program.LONGEST_RUN)


def test_an_index_out_of_range_in_a_block_is_an_error() -> None:
    torch.set_num_threads(2)
    b = mlp_and_embedding()
    wrong = torch.zeros(150, dtype=torch.int64)
    wrong[140] = 10
    with pytest.raises(IndexError, match="call 3"):
        run(b.build(), 150, torch.randn(150, 64), wrong)


def test_an_index_out_of_range_is_an_error() -> None:
    b = Builder()
    ids = b.input(TOKENS, (), torch.int64)
    (rows,) = gather.emit_embedding(b, torch.randn(10, 16), ids)
    assert rows is not None
    b.output(rows)
    program = b.build()
    (out,) = run(program, 2, torch.tensor([9, 0]))
    assert out.shape == (2, 16)
    for bad in (10, -1):
        with pytest.raises(IndexError, match="call 0"):
            run(program, 2, torch.tensor([0, bad]))


def test_the_builder_refuses_what_programs_do_not_have() -> None:
    b = Builder()
    with pytest.raises(ValueError, match="softmax is not a kernel"):
        b.call("softmax", x=1)
    with pytest.raises(ValueError, match="w8_bytes is not a kernel"):
        b.call("w8_bytes", n=1, k=1, groups=1)
    with pytest.raises(ValueError, match="rope takes x, cos"):
        b.call("rope", x=1, y=2)
    x = b.buffer(TOKENS, (64,))
    with pytest.raises(ValueError, match="whole buffer"):
        b.output(x.split([32, 32])[1])


def test_rows_of_logits_and_of_tokens_do_not_share_memory() -> None:
    b = Builder()
    x = b.input(TOKENS, (16,), torch.float32)
    index = b.input(LOGITS, (), torch.int64)
    normed, _, _ = norms.emit_rms_norm(b, x, None, 1e-6)
    assert normed is not None
    (chosen,) = gather.emit_select_rows(b, normed, index)
    assert chosen is not None
    again, _, _ = norms.emit_rms_norm(b, chosen, None, 1e-6)
    both, _, _ = norms.emit_rms_norm(b, normed, None, 1e-6)
    assert again is not None and both is not None
    b.output(again)
    b.output(both)
    values, rows = torch.randn(6, 16), torch.tensor([5, 0, 3])
    selected, every = run(b.build(), 6, values, rows, logits=3)
    twice = reference.rms_norm(reference.rms_norm(values, None, 1e-6), None, 1e-6)
    torch.testing.assert_close(every, twice)
    assert torch.equal(selected, every[rows])
