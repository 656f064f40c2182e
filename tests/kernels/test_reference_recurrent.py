"""Ops with a recurrent state: the reference against float64 sums written by other means, and the rules of slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from optkit.kernels import reference
from tests.support.recurrent import OPS, Batch, Call, cut, pool_of, random_call, run

EACH = pytest.mark.parametrize("op", OPS)
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def alone(call: Call) -> Tensor:
    """The result for all rows as one sequence from its first token on."""
    return run(call, Batch.of([call.tokens]), pool_of(call, 1))


def doubles(call: Call) -> list[Any]:
    return [t.double() if isinstance(t, Tensor) else t for t in call.tensors]


@pytest.mark.parametrize("activation", ["", "silu"])
def test_short_conv_is_a_convolution_padded_on_the_left(activation):
    call = random_call("short_conv", 9, activation=activation)
    x, weight, bias = doubles(call)
    padded = F.pad(x.T[None], (weight.shape[2] - 1, 0))
    expected = F.conv1d(padded, weight, bias, groups=x.shape[1])[0].T
    expected = F.silu(expected) if activation else expected
    torch.testing.assert_close(alone(call).double(), expected, **CLOSE)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("l2norm", [0, 1])
def test_gated_delta_rule_is_a_product_of_transition_matrices(by_channel, l2norm):
    """S_t = (I - beta k k^T) diag(exp g) S_{t-1} + beta k v^T: the state from all tokens before, as matrices."""
    call = random_call("gated_delta_rule", 7, by_channel=by_channel, l2norm=l2norm)
    q, k, v, g, beta = doubles(call)
    if l2norm:
        q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    heads, shared = v.shape[1], v.shape[1] // k.shape[1]
    expected = torch.zeros_like(v)
    for h in range(heads):
        state = torch.zeros(k.shape[2], v.shape[2], dtype=torch.float64)
        for t in range(call.tokens):
            key = k[t, h // shared]
            decay = torch.diag(torch.exp(g[t, h].expand(len(key))))
            transition = torch.eye(len(key), dtype=torch.float64) - beta[t, h] * torch.outer(key, key)
            state = transition @ decay @ state + beta[t, h] * torch.outer(key, v[t, h])
            expected[t, h] = call.options["scale"] * (q[t, h // shared] @ state)
    torch.testing.assert_close(alone(call).double(), expected, **CLOSE)


def test_ssd_scan_is_masked_attention_with_decays():
    """The dual form: y_t = sum over s <= t of (c_t b_s) exp(a (dt_{s+1} + ... + dt_t)) dt_s x_s, plus d x_t."""
    call = random_call("ssd_scan", 8)
    x, dt, a, b, c, d = doubles(call)
    shared = x.shape[1] // b.shape[1]
    b, c = b.repeat_interleave(shared, 1), c.repeat_interleave(shared, 1)
    sums = (dt * a).cumsum(0)
    decay = torch.exp(sums[:, None] - sums[None])
    causal = torch.ones(call.tokens, call.tokens, dtype=torch.float64).tril()
    scores = torch.einsum("thn,shn->tsh", c, b) * decay * causal[..., None]
    expected = torch.einsum("tsh,shp->thp", scores, x * dt[..., None]) + d[:, None] * x
    torch.testing.assert_close(alone(call).double(), expected, **CLOSE)


def test_selective_scan_is_a_weighted_sum_over_earlier_tokens():
    call = random_call("selective_scan", 8)
    x, dt, a, b, c, d = doubles(call)
    sums = dt.cumsum(0)  # [T, C]
    expected = d * x
    for t in range(call.tokens):
        for s in range(t + 1):
            weights = torch.einsum("n,nc,n->c", c[t], torch.exp(a * (sums[t] - sums[s])), b[s])
            expected[t] += weights * dt[s] * x[s]
    torch.testing.assert_close(alone(call).double(), expected, **CLOSE)


@EACH
def test_chunks_and_neighbours_change_no_bit(op):
    call = random_call(op, 11)
    whole = alone(call)
    pool = pool_of(call, 3)
    parts = []
    for first, last in ((0, 4), (4, 5), (5, 11)):
        other = random_call(op, 3, seed=9)
        both = cut(call, first, last) + other
        batch = Batch([last - first, 3], [last, 3], [2, 0])
        parts.append(run(both, batch, pool)[: last - first])
    assert torch.equal(torch.cat(parts), whole)


@EACH
def test_a_first_token_ignores_the_slot_and_padding_leaves_it(op):
    call = random_call(op, 5)
    clean, dirty = pool_of(call, 2), pool_of(call, 2).fill_(float("nan"))
    batch = Batch([4, 1], [4, 0], [0, 1])
    first, second = run(call, batch, clean), run(call, batch, dirty)
    assert torch.equal(first, second) and not first[4].any()
    assert torch.equal(clean[0], dirty[0]) and dirty[1].isnan().all()


@EACH
def test_results_have_the_dtype_of_the_activations(op):
    call = random_call(op, 3)
    pool = pool_of(call, 1)
    half = Call(call.op, [t.bfloat16() if i == 0 else t for i, t in enumerate(call.tensors)], call.options)
    assert run(half, Batch.of([3]), pool).dtype is torch.bfloat16 and pool.dtype is torch.float32


def test_runs_skip_padding():
    batch = Batch([2, 1, 3], [2, 0, 9], [5, 0, 1])
    assert list(reference.runs(*batch.tensors())) == [(slice(0, 2), 5, True), (slice(3, 6), 1, False)]
