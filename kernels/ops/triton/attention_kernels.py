"""The kernels of paged attention: tiles of queries by tensor cores, single queries by dot products, merged splits.

All compute an online softmax (arXiv 2205.14135) in base 2, with accumulators in float32. A tile of keys is TILE
positions, whatever the size of a page: the rows are gathered through the block table. K and V of int8 and E4M3 pools
are converted to the compute type without scales, exactly; K's scales multiply the scores and V's the weights: a
product for each key in place of a product for each number.

``FORMAT``: 0 float, 1 int8, 2 E4M3 bytes. Strides are in elements; K_BLOCK, V_BLOCK, K_SCALES and V_SCALES go from a
block of the pool, or of its scales, to the next.
"""

from __future__ import annotations

import triton
import triton.language as tl

BATCH = [
    "query_start",
    "seq_lens",
    "block_tables",
]  # which may lie anywhere and change in width: one compilation


@triton.jit
def numbers(stored, FORMAT: tl.constexpr, NATIVE: tl.constexpr, DTYPE: tl.constexpr):
    """Values of a pool in DTYPE, without their scale.

    Without NATIVE conversion E4M3 goes through float16, which has the same bits in other places, up to a factor of
    2^8.
    """
    if FORMAT == 2:
        if NATIVE:
            result = stored.to(tl.float8e4nv, bitcast=True).to(DTYPE)
        else:
            bits = ((stored & 0x7F).to(tl.uint16) << 7) | ((stored & 0x80).to(tl.uint16) << 8)
            result = (bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(DTYPE)
    else:
        result = stored.to(DTYPE)
    return result


@triton.jit
def capped(scores, scale, SOFTCAP: tl.constexpr):
    """``SOFTCAP * tanh(scores * scale / SOFTCAP)``, by an exponential with infinity for large scores."""
    e = tl.exp2(scores * (scale * (2.8853900817779268 / SOFTCAP)))  # exp(2x)
    return SOFTCAP - 2.0 * SOFTCAP / (e + 1.0)


@triton.jit
def first_key(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first key seen by the token at ``position``."""
    first = position * 0
    if WINDOW:
        first = tl.maximum(position - WINDOW + 1, 0)
    if CHUNK:
        first = tl.maximum(first, position // CHUNK * CHUNK)
    return first


@triton.jit
def beside_sink(weight, top, sink):
    """Factor and sum of weights of a row with a sink's share in the weights; scores and sink are exponents of 2."""
    best = tl.maximum(top, sink)
    keep = tl.exp2(top - best)
    return keep, weight * keep + tl.exp2(sink - best)


@triton.jit
def sequence_of(query_block, query_start, sequences, BLOCK_Q: tl.constexpr):
    """The sequence of a block of queries: s has the blocks from ``query_start[s] // BLOCK_Q + s`` on."""
    low = 0
    high = sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // BLOCK_Q + middle <= query_block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def attend_tiles(
    total, weight, top, queries, positions, slopes, start, stop, length, scale,
    k_cache, v_cache, k_scales, v_scales, table, kv_head,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SLOPES: tl.constexpr, SOFTCAP: tl.constexpr,
    FORMAT: tl.constexpr, NATIVE: tl.constexpr,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
    K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The tiles of [start, stop) added to total [M, DV], weight [M] and top [M], the largest score so far.

    Without MASKED every row sees every key. ``scale`` turns scores into exponents of 2; with SOFTCAP, into scores.
    ``slopes`` [M] are those of the rows, in exponents of 2, with SLOPES.
    """
    unit = 1.4426950408889634 if SOFTCAP > 0 else scale
    factor = 1.0 if SLOPES else unit
    d = tl.arange(0, D)
    dv = tl.arange(0, DV)
    offset = tl.arange(0, TILE)
    next_page = tl.load(table + (start + offset) // BLOCK_SIZE, mask=start + offset < length, other=0)
    for first in tl.range(start, stop, TILE):
        key = first + offset
        exists = key < length
        page = next_page.to(tl.int64)
        next_page = tl.load(table + (key + TILE) // BLOCK_SIZE, mask=key + TILE < length, other=0)
        at = (key % BLOCK_SIZE) * KV_HEADS + kv_head
        k_at = (page * K_BLOCK + at * DIM)[None, :] + d[:, None]
        if MASKED or D > DIM:
            inside = (d < DIM)[:, None]
            if MASKED:
                inside = inside & exists[None, :]
            k = tl.load(k_cache + k_at, mask=inside, other=0)
        else:
            k = tl.load(k_cache + k_at)
        scores = tl.dot(queries, numbers(k, FORMAT, NATIVE, queries.dtype), input_precision=PRECISION)
        if FORMAT:
            if MASKED:
                k_scale = tl.load(k_scales + page * K_SCALES + at, mask=exists, other=0.0)
            else:
                k_scale = tl.load(k_scales + page * K_SCALES + at)
            scores *= k_scale[None, :]
        if SOFTCAP > 0:
            scores = capped(scores, scale, SOFTCAP)
        if SLOPES:
            scores = scores * unit + slopes[:, None] * (key[None, :] - positions[:, None]).to(tl.float32)
        if MASKED:
            seen = key[None, :] <= positions[:, None]
            if WINDOW or CHUNK:
                seen = seen & (key[None, :] >= first_key(positions, WINDOW, CHUNK)[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * factor)
        base = new_top
        if MASKED:  # a row that has seen nothing yet
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(scores * factor - base[:, None])
        shrink = tl.exp2(top - base)
        weight = weight * shrink + tl.sum(p, 1)
        total = total * shrink[:, None]
        top = new_top

        v_at = (page * V_BLOCK + at * V_DIM)[:, None] + dv[None, :]
        if MASKED or DV > V_DIM:
            inside = (dv < V_DIM)[None, :]
            if MASKED:
                inside = inside & exists[:, None]
            v = tl.load(v_cache + v_at, mask=inside, other=0)
        else:
            v = tl.load(v_cache + v_at)
        values = numbers(v, FORMAT, NATIVE, queries.dtype)
        if FORMAT:
            if MASKED:
                v_scale = tl.load(v_scales + page * V_SCALES + at, mask=exists, other=0.0)
            else:
                v_scale = tl.load(v_scales + page * V_SCALES + at)
            if queries.dtype == tl.float16:  # weights times small scales would leave float16's range
                values = (values * v_scale[:, None]).to(tl.float16)
            else:
                p *= v_scale[None, :]
        total = tl.dot(p.to(queries.dtype), values, total, input_precision=PRECISION)
    return total, weight, top


@triton.jit(do_not_specialize=["sequences", "table_stride"], do_not_specialize_on_alignment=BATCH)
def attention_tiles(
    q, k_cache, v_cache, k_scales, v_scales, out, parts, weights, tops, query_start, seq_lens, block_tables,
    sinks, slopes, sequences, scale, q_token, q_head, table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
    K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SLOPES: tl.constexpr,
    SINGLE: tl.constexpr, SKIP_SINGLE: tl.constexpr, SPLITS: tl.constexpr,
    M: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """M rows, a row being a query token and a head of the group of a KV head, over one of SPLITS parts of the keys.

    Grid: KV heads, blocks of queries, splits. With SINGLE, a block is a sequence, and only sequences of one new token
    count; SKIP_SINGLE leaves these sequences out. Longest blocks of a prompt start first. With splits, results go
    unnormalized to ``parts`` [rows, H, SPLITS, V_DIM] with ``weights`` and ``tops`` [rows, H, SPLITS]; a row is a
    sequence with SINGLE, else a token.
    """
    group: tl.constexpr = HEADS // KV_HEADS
    tokens_at_once: tl.constexpr = 1 if SINGLE else M // group
    kv_head = tl.program_id(0)
    split = tl.program_id(2)
    if SINGLE:
        sequence = tl.program_id(1)
        skipped = 0
    else:
        block = tl.num_programs(1) - 1 - tl.program_id(1)
        sequence = sequence_of(block, query_start, sequences, tokens_at_once)
        skipped = (block - sequence - tl.load(query_start + sequence) // tokens_at_once) * tokens_at_once
    start = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - start
    if skipped >= count:
        return
    if SINGLE and count != 1:
        return
    if SKIP_SINGLE and count == 1:
        return
    length = tl.load(seq_lens + sequence)
    row = tl.arange(0, M)
    index = skipped + row // group  # of the token in the sequence's new ones
    head = kv_head * group + row % group
    known = (row < tokens_at_once * group) & (index < count)
    positions = length - count + index
    d = tl.arange(0, D)
    token = (start + index).to(tl.int64)
    q_at = (token * q_token + head * q_head)[:, None] + d[None, :]
    queries = tl.load(q + q_at, mask=known[:, None] & (d < DIM)[None, :], other=0.0)

    earliest = length - count + skipped
    latest = tl.minimum(earliest + tokens_at_once, length) - 1
    begin = 0
    whole_from = 0
    if WINDOW or CHUNK:
        begin = first_key(earliest, WINDOW, CHUNK) // TILE * TILE
        whole_from = (first_key(latest, WINDOW, CHUNK) + TILE - 1) // TILE * TILE
    end = latest + 1
    whole_to = tl.maximum(earliest + 1, 0) // TILE * TILE  # tiles in between are seen by all rows
    if SPLITS > 1:
        share = (tl.maximum(end - begin, 0) + SPLITS * TILE - 1) // (SPLITS * TILE) * TILE
        begin += split * share
        end = tl.minimum(end, begin + share)

    total = tl.zeros((M, tl.constexpr(DV)), tl.float32)
    weight = tl.zeros((M,), tl.float32)
    top = tl.full((M,), float("-inf"), tl.float32)
    table = block_tables + sequence * table_stride
    slope = weight
    if SLOPES:
        slope = tl.load(slopes + head) * 1.4426950408889634
    if WINDOW or CHUNK:
        left = tl.minimum(end, whole_from)
        total, weight, top = attend_tiles(
            total, weight, top, queries, positions, slope, begin, left, length, scale,
            k_cache, v_cache, k_scales, v_scales, table, kv_head,
            True, WINDOW, CHUNK, SLOPES, SOFTCAP, FORMAT, NATIVE, KV_HEADS, DIM, V_DIM, D, DV,
            BLOCK_SIZE, K_BLOCK, V_BLOCK, K_SCALES, V_SCALES, TILE, PRECISION,
        )  # fmt: skip
        begin = tl.maximum(begin, whole_from)
    total, weight, top = attend_tiles(
        total, weight, top, queries, positions, slope, begin, tl.minimum(end, whole_to), length, scale,
        k_cache, v_cache, k_scales, v_scales, table, kv_head,
        False, WINDOW, CHUNK, SLOPES, SOFTCAP, FORMAT, NATIVE, KV_HEADS, DIM, V_DIM, D, DV,
        BLOCK_SIZE, K_BLOCK, V_BLOCK, K_SCALES, V_SCALES, TILE, PRECISION,
    )  # fmt: skip
    total, weight, top = attend_tiles(
        total, weight, top, queries, positions, slope, tl.maximum(begin, whole_to), end, length, scale,
        k_cache, v_cache, k_scales, v_scales, table, kv_head,
        True, WINDOW, CHUNK, SLOPES, SOFTCAP, FORMAT, NATIVE, KV_HEADS, DIM, V_DIM, D, DV,
        BLOCK_SIZE, K_BLOCK, V_BLOCK, K_SCALES, V_SCALES, TILE, PRECISION,
    )  # fmt: skip

    dv = tl.arange(0, DV)
    inside = known[:, None] & (dv < V_DIM)[None, :]
    if SPLITS == 1:
        if SINKS:
            keep, weight = beside_sink(weight, top, tl.load(sinks + head) * 1.4426950408889634)
            total = total * keep[:, None]
        total = total / tl.where(weight > 0, weight, 1.0)[:, None]
        o_at = ((token * HEADS + head) * V_DIM)[:, None] + dv[None, :]
        tl.store(out + o_at, total.to(out.dtype.element_ty), mask=inside)
    else:
        place = token if not SINGLE else tl.zeros_like(token) + sequence
        part = (place * HEADS + head) * SPLITS + split
        tl.store(tops + part, top, mask=known)
        tl.store(weights + part, weight, mask=known)
        tl.store(parts + part[:, None] * V_DIM + dv[None, :], total, mask=inside)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=BATCH)
def attention_heads(
    q, k_cache, v_cache, k_scales, v_scales, out, parts, weights, tops, query_start, seq_lens, block_tables,
    sinks, slopes, scale, q_token, q_head, table_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
    K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SLOPES: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A query of a head with keys of its own: no tensor cores, which would waste all rows but one.

    Grid: heads, sequences (of one new token), splits. Each of TILE lanes keeps a softmax of its own over every
    TILE-th key, so that nothing passes between threads until the end.
    """
    head = tl.program_id(0)
    sequence = tl.program_id(1)
    split = tl.program_id(2)
    start = tl.load(query_start + sequence)
    if tl.load(query_start + sequence + 1) - start != 1:
        return
    length = tl.load(seq_lens + sequence)
    d = tl.arange(0, D)
    dv = tl.arange(0, DV)
    token = start.to(tl.int64)
    query = tl.load(q + token * q_token + head * q_head + d, mask=d < DIM, other=0.0).to(tl.float32)
    seen_from = first_key(tl.maximum(length - 1, 0), WINDOW, CHUNK)
    begin = seen_from // TILE * TILE
    end = length
    if SPLITS > 1:
        share = (end - begin + SPLITS * TILE - 1) // (SPLITS * TILE) * TILE
        begin += split * share
        end = tl.minimum(end, begin + share)

    unit = 1.4426950408889634 if SOFTCAP > 0 else scale
    total = tl.zeros((TILE, tl.constexpr(DV)), tl.float32)
    weight = tl.zeros((TILE,), tl.float32)
    top = tl.full((TILE,), float("-inf"), tl.float32)
    table = block_tables + sequence * table_stride
    offset = tl.arange(0, TILE)
    next_page = tl.load(table + (begin + offset) // BLOCK_SIZE, mask=begin + offset < end, other=0)
    for first in tl.range(begin, end, TILE, num_stages=STAGES):
        key = first + offset
        exists = key < end
        page = next_page.to(tl.int64)
        next_page = tl.load(table + (key + TILE) // BLOCK_SIZE, mask=key + TILE < end, other=0)
        at = (key % BLOCK_SIZE) * HEADS + head
        inside = exists[:, None] & (d < DIM)[None, :]
        k = tl.load(k_cache + (page * K_BLOCK + at * DIM)[:, None] + d[None, :], mask=inside, other=0)
        inside = exists[:, None] & (dv < V_DIM)[None, :]
        v = tl.load(v_cache + (page * V_BLOCK + at * V_DIM)[:, None] + dv[None, :], mask=inside, other=0)
        scores = tl.sum(numbers(k, FORMAT, NATIVE, tl.float32) * query[None, :], 1)
        if FORMAT:
            scores *= tl.load(k_scales + page * K_SCALES + at, mask=exists, other=0.0)
        if SOFTCAP > 0:
            scores = capped(scores, scale, SOFTCAP)
        seen = exists
        if WINDOW or CHUNK:
            seen = seen & (key >= seen_from)
        scores = scores * unit
        if SLOPES:
            scores += tl.load(slopes + head) * 1.4426950408889634 * (key - length + 1).to(tl.float32)
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, scores)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(scores - base)
        shrink = tl.exp2(top - base)
        weight = weight * shrink + p
        top = new_top
        if FORMAT:
            p *= tl.load(v_scales + page * V_SCALES + at, mask=exists, other=0.0)
        total = total * shrink[:, None] + p[:, None] * numbers(v, FORMAT, NATIVE, tl.float32)

    best = tl.max(top, 0)
    share_of = tl.exp2(top - tl.where(best == float("-inf"), 0.0, best))
    weight_sum = tl.sum(weight * share_of, 0)
    result = tl.sum(total * share_of[:, None], 0)
    if SPLITS == 1:
        if SINKS:
            keep, weight_sum = beside_sink(weight_sum, best, tl.load(sinks + head) * 1.4426950408889634)
            result *= keep
        result = result / tl.where(weight_sum > 0, weight_sum, 1.0)
        tl.store(out + (token * HEADS + head) * V_DIM + dv, result.to(out.dtype.element_ty), mask=dv < V_DIM)
    else:
        part = (sequence * HEADS + head) * SPLITS + split
        tl.store(tops + part, best)
        tl.store(weights + part, weight_sum)
        tl.store(parts + part * V_DIM + dv, result, mask=dv < V_DIM)


@triton.jit(do_not_specialize_on_alignment=["query_start"])
def merge_splits(
    parts, weights, tops, out, query_start, sinks,
    HEADS: tl.constexpr, V_DIM: tl.constexpr, SPLITS: tl.constexpr, DV: tl.constexpr, SINGLE: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Merge a head's SPLITS partial results into its output row. Grid: rows of ``parts``, heads."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    token = row
    if SINGLE:
        token = tl.load(query_start + row).to(tl.int64)
        if tl.load(query_start + row + 1) - token != 1:
            return
    part = (row * HEADS + head) * SPLITS + tl.arange(0, SPLITS)
    dv = tl.arange(0, DV)
    top = tl.load(tops + part)
    best = tl.max(top, 0)
    sink = 0.0
    if SINKS:
        sink = tl.load(sinks + head) * 1.4426950408889634
        best = tl.maximum(best, sink)
    share = tl.exp2(top - tl.where(best == float("-inf"), 0.0, best))
    weight = tl.sum(tl.load(weights + part) * share, 0)
    if SINKS:
        weight += tl.exp2(sink - best)
    values = tl.load(parts + part[:, None] * V_DIM + dv[None, :], mask=(dv < V_DIM)[None, :], other=0.0)
    result = tl.sum(values * share[:, None], 0) / tl.where(weight > 0, weight, 1.0)
    tl.store(out + (token * HEADS + head) * V_DIM + dv, result.to(out.dtype.element_ty), mask=dv < V_DIM)
