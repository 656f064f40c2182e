"""Native ops with a recurrent state: against the reference at odd shapes, and the same bits in any batch and chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from optkit.kernels import reference
from optkit.kernels.cpu import native, recurrent
from tests.support.isas import usable_isas
from tests.support.recurrent import OPS, Batch, Call, cut, pool_of, random_call, run

pytestmark = pytest.mark.skipif(not native.available(), reason="no native library")
# Odd widths, one vector, whole blocks; more tokens than a segment; heads that share keys and heads that do not.
CASES: dict[str, list[dict[str, Any]]] = {
    "short_conv": [
        {},
        {"channels": 1, "taps": 2, "bias": False, "activation": ""},
        {"channels": 160, "taps": 7},
    ],
    "gated_delta_rule": [
        {},
        {"by_channel": True, "values": 32},
        {"l2norm": 0, "keys": 16, "values": 16, "key_heads": 4},
        {"by_channel": True, "keys": 1, "values": 1, "heads": 1, "key_heads": 1},
        {"keys": 33, "values": 48, "heads": 3, "key_heads": 1},
    ],
    "ssd_scan": [{}, {"channels": 64, "states": 16}, {"channels": 16, "heads": 6, "groups": 3}],
    "selective_scan": [{}, {"channels": 144, "states": 16}, {"channels": 1, "states": 1}],
}
EACH = pytest.mark.parametrize(("op", "sizes"), [(op, sizes) for op in OPS for sizes in CASES[op]])


@pytest.fixture(params=usable_isas())
def isa(request):
    native.set_isa(request.param)
    yield request.param
    native.set_isa(None)


def kernel(call: Call):
    """The native function with packed weights, as lowering binds it."""
    row = next(row for row in recurrent.KERNELS if row.op == call.op)
    if row.pack is None:
        return row.fn
    packed = row.pack({i: t for i, t in enumerate(call.tensors) if i in (1, 2) and t is not None}, {})
    return lambda *args, **options: row.fn(args[0], packed[1], *args[2:], **options)


def close(given: Tensor, expected: Tensor) -> None:
    scale = max(float(expected.abs().max()), 1e-3)
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=2e-6 * scale)


@EACH
def test_results_and_states_are_those_of_the_reference(op, sizes, isa):
    """A ragged history: a prompt, a longer one than a segment of tokens, padding, a decode, a decode that begins."""
    batches = [
        Batch([5, 40, 2], [5, 40, 0], [3, 1, 0]),
        Batch([1, 3, 1, 1], [41, 8, 1, 0], [1, 3, 0, 2]),
        Batch([1, 1], [42, 2], [1, 0]),
    ]
    call = random_call(op, 47, **sizes)
    ours, theirs = (pool_of(call, 4).fill_(float("nan")) for _ in range(2))
    for i, batch in enumerate(batches):
        call = random_call(op, sum(batch.rows), seed=i, **sizes)
        close(run(call, batch, ours, kernel(call)), run(call, batch, theirs))
        assert torch.equal(ours.isnan(), theirs.isnan())
        close(ours.nan_to_num(), theirs.nan_to_num())


@EACH
def test_a_sequence_has_the_same_bits_in_any_batch_and_chunks(op, sizes, isa):
    call = random_call(op, 70, **sizes)
    whole_pool, pool = pool_of(call, 1), pool_of(call, 3)
    whole = run(call, Batch.of([70]), whole_pool, kernel(call))
    parts = []
    for first, last in ((0, 33), (33, 34), (34, 69), (69, 70)):
        both = cut(call, first, last) + random_call(op, 3, seed=9, **sizes)
        batch = Batch([last - first, 3], [last, 3], [2, 0])
        parts.append(run(both, batch, pool, kernel(call))[: last - first])
    assert torch.equal(torch.cat(parts), whole) and torch.equal(pool[2], whole_pool[0])


@pytest.mark.parametrize("op", OPS)
def test_threads_change_no_bit(op):
    sizes = {"channels": 600} if op in ("short_conv", "selective_scan") else {"heads": 8}
    call, results = random_call(op, 90, **sizes), []
    for threads in (1, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        results.append(run(call, Batch([60, 30], [60, 30], [1, 0]), pool_of(call, 2), kernel(call)))
        torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.parametrize("op", OPS)
def test_fused_multiply_add_gives_the_same_bits_on_every_instruction_set(op):
    call, results = random_call(op, 40), {}
    for name in usable_isas():
        native.set_isa(name)
        results[name] = run(call, Batch.of([40]), pool_of(call, 1), kernel(call))
    native.set_isa(None)
    results.pop("portable", None)
    assert all(torch.equal(result, next(iter(results.values()))) for result in results.values())


@pytest.mark.parametrize("op", OPS)
def test_rows_with_gaps_are_read_in_place(op):
    call = random_call(op, 6)
    kept = {"short_conv": 1, "gated_delta_rule": 5, "ssd_scan": 2, "selective_scan": 2}[op]
    spread = [torch.cat((t, t * 9), dim=-1)[..., : t.shape[-1]] if i == 0 and t.ndim == 2 else t
              for i, t in enumerate(call.tensors)]  # fmt: skip
    assert kept and torch.equal(
        run(Call(op, spread, call.options), Batch.of([6]), pool_of(call, 1), kernel(call)),
        run(call, Batch.of([6]), pool_of(call, 1), kernel(call)),
    )


@pytest.mark.parametrize("op", OPS)
def test_half_precision_runs_the_reference(op):
    call = random_call(op, 4)
    half = Call(op, [t.bfloat16() if i == 0 else t for i, t in enumerate(call.tensors)], call.options)
    given = run(half, Batch.of([4]), pool_of(call, 1), kernel(half))
    assert given.dtype is torch.bfloat16 and torch.equal(given, run(half, Batch.of([4]), pool_of(call, 1)))


@pytest.mark.parametrize("op", OPS)
def test_tensors_that_native_code_would_misread_are_refused(op):
    call, batch = random_call(op, 4), Batch.of([4])
    pool = pool_of(call, 2)
    for wrong in (pool[..., :-1], pool[:, :-1], pool.transpose(-1, -2)):
        with pytest.raises(ValueError, match="the pool must be"):
            run(call, batch, wrong, kernel(call))
    starts, lengths, slots = batch.tensors()
    for given in (
        (starts[:1], lengths, slots),
        (starts, lengths, slots.long()),
        (starts.long(), lengths, slots),
    ):
        with pytest.raises(ValueError, match="must be torch"):
            kernel(call)(*call.tensors, pool, *given, **call.options)
    short = [t[:, :-1] if i == 1 and op != "short_conv" else t for i, t in enumerate(call.tensors)]
    if op != "short_conv":
        with pytest.raises(ValueError, match="a native kernel can't run"):
            run(Call(op, short, call.options), batch, pool, kernel(call))


def test_packed_weight_has_the_channels_of_a_tap_side_by_side():
    weight = torch.randn(5, 1, 3)
    packed = recurrent.pack_conv({1: weight, 2: torch.zeros(5)}, {})
    assert list(packed) == [1] and torch.equal(packed[1], weight[:, 0].T) and packed[1].is_contiguous()
    assert reference.ACTIVATIONS == ("", "silu")
