// Linear layers with int4 weights and int8 activations: packing, unpacking, and the loop over panels and rows.
//
// A weight is `code * scale + minimum` with code 0 .. 15 and a scale and minimum for each output channel and group of
// input channels, or, symmetric, `(code - 8) * scale`; an integer zero point is the minimum `-zero * scale`. A layer is
//
//     sum over groups of scale_x * (scale * sum((q - 128) * code) + minimum * sum(q - 128))
//
// whose inner sums are exact integers, the second one the same for all output channels: computed once a call (`sums`).
//
// The weight is packed into panels of 32 output channels as in int8.cpp, two steps to a byte: byte j of a pair of steps
// holds byte j of the first step in its low half and byte j of the second in its high half. A panel is a sequence of
// records, one a group: 32 scales, 32 minimums, the steps. So decode reads memory strictly forward, in one stream.
//
// Many rows: a panel is unpacked to bytes into scratch memory, once for each block of rows. With AVX512-VNNI the int8
// tiles do the rest; AVX2 has tiles of its own, because the codes, up to 15, allow a cheaper product than int8 weights
// do (int4_avx2.cpp), and AVX-VNNI shares these (int4_ymm.h). Few rows: tiles unpack in registers (int4_avx512.cpp,
// int4_ymm.h), since the weights then pass only once. All add the same integers and then the same floats in the same
// order (int8.cpp), so they give the same bits.
#include "int4.h"

#include <cstring>

#include "dispatch.h"
#include "paired_rows.h"
#include "scratch.h"
#include "threads.h"

namespace optkit {
namespace {

// -- rows ------------------------------------------------------------------------------------------------

// What the tiles want of some activations; pieces of a thread's scratch memory.
struct Rows {
    float* scale;       // [rows][groups]
    float* sums;        // [rows][groups]: scale * sum of the group's (q - 128)
    int32_t* start;     // [rows][groups]: where accumulators of few rows start
    uint8_t* signed_q;  // [rows, even][k]: q - 128 as s8; null for the int8 tiles
};

Rows rows_in(GrowingMemory& scratch, int64_t rows, int64_t groups, int64_t k, bool with_signed_q) {
    const int64_t bytes = rows * groups * 12 + (with_signed_q ? (rows + rows % 2) * k : 0);
    auto* scale = reinterpret_cast<float*>(scratch.at_least<char>(bytes));
    float* sums = scale + rows * groups;
    auto* start = reinterpret_cast<int32_t*>(sums + rows * groups);
    return {scale, sums, start, with_signed_q ? reinterpret_cast<uint8_t*>(start + rows * groups) : nullptr};
}

// The sum of n bytes, n a multiple of 8: bytes of even and of odd index add up in the 16-bit lanes of 64-bit words.
OPTKIT_INLINE int32_t sum_of(const uint8_t* q, int64_t n) {
    constexpr uint64_t LOW = 0x00ff00ff00ff00ff, ONES = 0x0001000100010001;
    constexpr int64_t MOST = 32;  // bytes that 4 lanes hold without overflow when their sum lands in one
    int32_t sum = 0;
    for (int64_t i = 0; i < n; i += MOST) {
        uint64_t lanes = 0;
        for (int64_t j = i; j < std::min(i + MOST, n); j += 8) {
            uint64_t word;
            std::memcpy(&word, q + j, sizeof word);
            lanes += (word & LOW) + (word >> 8 & LOW);
        }
        sum += static_cast<int32_t>(lanes * ONES >> 48);
    }
    return sum;
}

OPTKIT_INLINE void prepare_row(const LinearW4A8& p, int64_t m, const Rows& to, int64_t row) {
    const int64_t group = p.group_steps * STEP, k = p.groups * group, shared = p.groups / p.scale_groups;
    const int64_t start = p.layout.minimum() ? 0 : -8;
    const uint8_t* q = p.q + m * p.q_stride;
    for (int64_t g = 0, at = row * p.groups; g < p.groups; ++g, ++at) {
        const int32_t sum = (group == 32 ? sum_of(q + g * 32, 32) : sum_of(q + g * group, group)) - 128 * group;
        const float scale = p.scale[m * p.scale_groups + (shared == 1 ? g : g / shared)];
        to.scale[at] = scale;
        to.sums[at] = scale * static_cast<float>(sum);
        to.start[at] = start * sum;
    }
    if (!to.signed_q) return;
    uint8_t* __restrict__ signed_q = to.signed_q + row * k;
    for (int64_t i = 0; i < k; ++i) signed_q[i] = q[i] ^ 0x80;
}

// Rows [m, m + count) of the layer become rows [0, count).
OPTKIT_INLINE void prepare_rows(const LinearW4A8& p, int64_t m, int64_t count, const Rows& to) {
    for (int64_t row = 0; row < count; ++row) prepare_row(p, m + row, to, row);
}

// -- panels ----------------------------------------------------------------------------------------------

Unpacked unpacked_in(void* memory, int64_t groups, int64_t k) {
    auto* weight = static_cast<int8_t*>(memory);
    auto* offset = reinterpret_cast<int32_t*>(weight + k * PANEL);
    auto* scale = reinterpret_cast<float*>(offset + groups * PANEL);
    return {weight, offset, scale, scale + groups * PANEL};
}

int64_t unpacked_bytes(int64_t groups, int64_t k) { return (k + groups * 12) * PANEL; }

// One group's weights: codes, or code - 8 with `zero` 8; and their sums times -128.
OPTKIT_INLINE void unpack_codes(const uint8_t* codes, int64_t steps, uint8_t zero, int8_t* weight, int32_t* offset) {
    int16_t sums[STEP_BYTES] = {};
    for (int64_t s = 0; s < steps; s += 2, codes += STEP_BYTES, weight += 2 * STEP_BYTES)
        for (int64_t j = 0; j < STEP_BYTES; ++j) {
            const auto low = static_cast<int8_t>((codes[j] & 15) - zero);
            const auto high = static_cast<int8_t>((codes[j] >> 4) - zero);
            weight[j] = low;
            weight[STEP_BYTES + j] = high;
            sums[j] += static_cast<int8_t>(low + high);
        }
    for (int64_t c = 0; c < PANEL; ++c)
        offset[c] = -128 * (sums[4 * c] + sums[4 * c + 1] + sums[4 * c + 2] + sums[4 * c + 3]);
}

OPTKIT_INLINE void unpack_panel(const LinearW4A8& p, const uint8_t* records, const Unpacked& to) {
    const int64_t group = p.group_steps * STEP_BYTES;
    const uint8_t zero = p.layout.minimum() ? 0 : 8;
    for (int64_t g = 0; g < p.groups; ++g, records += p.layout.size(p.group_steps)) {
        widen(records, p.layout.half, to.scale + g * PANEL);
        if (p.layout.minimum()) widen_minimums(records, p.layout, to.scale + g * PANEL, to.minimum + g * PANEL);
        unpack_codes(records + p.layout.codes(), p.group_steps, zero, to.weight + g * group, to.offset + g * PANEL);
    }
}

// -- variants --------------------------------------------------------------------------------------------

using Prepare = void (*)(const LinearW4A8&, int64_t, int64_t, const Rows&);
using Unpack = void (*)(const LinearW4A8&, const uint8_t*, const Unpacked&);

void prepare_portable(const LinearW4A8& p, int64_t m, int64_t count, const Rows& to) { prepare_rows(p, m, count, to); }
void unpack_portable(const LinearW4A8& p, const uint8_t* records, const Unpacked& to) { unpack_panel(p, records, to); }
#if OPTKIT_X86
OPTKIT_AVX2 void prepare_avx2(const LinearW4A8& p, int64_t m, int64_t count, const Rows& to) {
    prepare_rows(p, m, count, to);
}
OPTKIT_AVX512 void prepare_avx512(const LinearW4A8& p, int64_t m, int64_t count, const Rows& to) {
    prepare_rows(p, m, count, to);
}
#endif
#if OPTKIT_ARM
// For linear_paired_codes.
void prepare_pairs(const LinearW4A8& p, int64_t m, int64_t count, const Rows& to) {
    auto* pairs = reinterpret_cast<int8_t*>(to.signed_q);
    prepare_rows(p, m, count, {to.scale, to.sums, to.start, nullptr});
    pair_rows(p.q + m * p.q_stride, p.q_stride, count, p.groups, p.group_steps, pairs);
}
#endif

struct Functions {
    Prepare prepare, prepare_many;
    Unpack unpack;
    int64_t most_few;    // rows, up to which unpacking in registers is faster than through memory
    FewRows few_rows;    // null: there is no tile for few rows
    ManyRows many_rows;  // null: the int8 tiles, for weights less their zero point
};

Functions functions() {
#ifdef OPTKIT_AVX_VNNI
    if (isa() == Isa::avx_vnni)
        return {prepare_avx2, prepare_avx2, unpack_avx2, 36, linear_w4a8_avx_vnni, linear_codes_avx_vnni};
#endif
#if OPTKIT_X86
    if (base_isa() == Isa::avx512_vnni)
        return {prepare_avx512, prepare_avx512, unpack_avx512, 36, linear_w4a8_avx512, nullptr};
    if (base_isa() == Isa::avx2)
        return {prepare_avx2, prepare_avx2, unpack_avx2, 7, linear_w4a8_avx2, linear_codes_avx2};
#endif
#if OPTKIT_ARM
    // The baseline has Neon's vectors of integers, which is all that preparing rows takes. Both limits are estimates.
    if (isa() == Isa::neon_i8mm)
        return {prepare_portable, prepare_pairs, unpack_i8mm, 3, linear_w4a8_neon, linear_paired_codes};
    if (base_isa() == Isa::neon_dotprod)
        return {prepare_portable, prepare_portable, unpack_neon, 16, linear_w4a8_neon, nullptr};
#endif
    return {prepare_portable, prepare_portable, unpack_portable, 0, nullptr, nullptr};
}

// -- the loop --------------------------------------------------------------------------------------------

// Prepared rows, of which the first is the layer's row `m`, as the tiles see them: a layer of its own.
Linear view_of(const LinearW4A8& p, int64_t m, const Rows& rows) {
    Linear view{};
    view.q = rows.signed_q ? rows.signed_q : p.q + m * p.q_stride;
    view.q_stride = rows.signed_q ? p.groups * p.group_steps * STEP : p.q_stride;
    view.scale = rows.scale, view.sums = rows.sums;
    view.bias = p.bias, view.out = p.out + m * p.n, view.n = p.n;
    view.steps = p.groups * p.group_steps, view.groups = p.groups, view.group_steps = p.group_steps;
    return view;
}

// Panels [from, to) for rows [m, m + count), by way of scratch memory. Every task prepares its rows itself: that is
// little beside the products, and a barrier after a common preparation may wait for a thread that isn't running.
void by_unpacking(const LinearW4A8& p, const Functions& f, int64_t from, int64_t to, int64_t m, int64_t count) {
    thread_local GrowingMemory row_scratch, panel_scratch;
    const int64_t k = p.groups * p.group_steps * STEP, record = p.layout.size(p.group_steps), bytes = p.groups * record;
    const Rows rows = rows_in(row_scratch, count, p.groups, k, f.many_rows);
    const Unpacked unpacked = unpacked_in(panel_scratch.at_least<char>(unpacked_bytes(p.groups, k)), p.groups, k);
    const Linear view = view_of(p, m, rows);
    const LinearRows tiles = linear_rows();
    f.prepare_many(p, m, count, rows);
    for (int64_t i = from; i < to; ++i) {
        const uint8_t* records = p.weight + i * bytes;
        f.unpack(p, records, unpacked);
        const float* minimum = p.layout.minimum() ? unpacked.minimum : nullptr;
        const Panel panel{i * PANEL, unpacked.weight, unpacked.offset, unpacked.scale, minimum,
                          records + bytes, record / p.group_steps};
        if (f.many_rows)
            f.many_rows(view, rows.start, panel, 0, count);
        else
            tiles(view, panel, 0, count);
    }
}

// The same for few rows, which `view` and `start` hold prepared.
void in_registers(const LinearW4A8& p, FewRows tiles, const Linear& view, const int32_t* start, int64_t from,
                  int64_t to, int64_t m, int64_t count) {
    const int64_t bytes = p.groups * p.layout.size(p.group_steps);
    for (int64_t i = from; i < to; ++i) tiles(view, start, p.weight + i * bytes, p.layout, i * PANEL, m, count);
}

}  // namespace

void linear_w4a8(const LinearW4A8& p, int64_t m, int64_t k, int threads) {
    if (m == 0 || p.n == 0) return;
    thread_local GrowingMemory scratch;
    const Functions f = functions();
    const int64_t all_panels = divide_up(p.n, PANEL);
    const Tasks tasks(m, all_panels, k, threads);
    const bool few = f.few_rows && m <= f.most_few;
    const Rows rows = few ? rows_in(scratch, m, p.groups, k, true) : Rows{};
    const Linear view = view_of(p, 0, rows);
    if (few) f.prepare(p, 0, m, rows);
    tasks.run(m, all_panels, threads, [&](int64_t row, int64_t count, int64_t from, int64_t to) {
        if (few)
            in_registers(p, f.few_rows, view, rows.start, from, to, row, count);
        else
            by_unpacking(p, f, from, to, row, count);
    });
}

void linear_w4a8_panels(const LinearW4A8& p, int64_t from, int64_t to, int64_t row, int64_t rows) {
    thread_local GrowingMemory scratch;
    const Functions f = functions();
    if (!f.few_rows || rows > f.most_few) return by_unpacking(p, f, from, to, row, rows);
    LinearW4A8 part = p;
    part.q += row * p.q_stride, part.scale += row * p.scale_groups, part.out += row * p.n;
    const Rows prepared = rows_in(scratch, rows, p.groups, p.groups * p.group_steps * STEP, true);
    f.prepare(part, 0, rows, prepared);
    in_registers(part, f.few_rows, view_of(part, 0, prepared), prepared.start, from, to, 0, rows);
}

namespace {

// -- packing ---------------------------------------------------------------------------------------------

// A weight as the graph holds it.
struct Source {
    const uint8_t* codes;    // [n][k / 2], the even channel of a pair in the low half
    const uint8_t* scale;    // [n][groups], float16 or float32
    const uint8_t* low;      // minimums like the scales, or zero points of a byte, or null
    int64_t n, k, groups;
};

// Four codes of four bits, in the low half of `codes`, one to a byte.
OPTKIT_INLINE uint32_t spread(uint32_t codes) {
    codes = (codes | codes << 8) & 0x00ff00ff;
    return (codes | codes << 4) & 0x0f0f0f0f;
}

// The 32 scales, minimums or zero points of a group.
void pack_row(const uint8_t* values, const Source& w, int64_t first, int64_t g, int64_t size, uint8_t* packed) {
    std::memset(packed, 0, PANEL * size);
    for (int64_t c = 0; c < std::min(PANEL, w.n - first); ++c)
        std::memcpy(packed + c * size, values + ((first + c) * w.groups + g) * size, size);
}

void pack_record(const Source& w, RecordLayout layout, int64_t first, int64_t g, uint8_t* packed) {
    const int64_t group = w.k / w.groups;
    pack_row(w.scale, w, first, g, layout.row() / PANEL, packed);
    if (layout.minimum()) pack_row(w.low, w, first, g, layout.low_row() / PANEL, packed + layout.row());
    uint8_t* codes = packed + layout.codes();
    std::memset(codes, 0, group / (2 * STEP) * STEP_BYTES);
    for (int64_t c = 0; c < std::min(PANEL, w.n - first); ++c) {
        const uint8_t* row = w.codes + ((first + c) * w.k + g * group) / 2;
        for (int64_t pair = 0; pair < group / (2 * STEP); ++pair) {
            uint32_t eight;  // codes, those of the first step in the low half
            std::memcpy(&eight, row + pair * STEP, sizeof eight);
            const uint32_t both = spread(eight & 0xffff) | spread(eight >> 16) << 4;
            std::memcpy(codes + pair * STEP_BYTES + c * STEP, &both, sizeof both);
        }
    }
}

}  // namespace
}  // namespace optkit

using namespace optkit;

// Bytes of a packed weight [n, k]. `half` is 0 or 1 and `levels` a value of Levels, see RecordLayout.
OPTKIT_API int64_t optkit_w4_bytes(int64_t n, int64_t k, int64_t groups, int half, int levels) {
    const RecordLayout layout{half != 0, static_cast<Levels>(levels)};
    return divide_up(n, PANEL) * groups * layout.size(k / groups / STEP);
}

// Pack codes [n, k / 2], two to a byte, and their scales [n, groups] into `blob` of optkit_w4_bytes bytes. `low` holds
// the minimums or the zero points, as `levels` says; null for symmetric weights.
OPTKIT_API void optkit_pack_w4(const uint8_t* codes, const void* scale, const void* low, uint8_t* blob,
                               int64_t n, int64_t k, int64_t groups, int half, int levels, int threads) {
    const Source w{codes, static_cast<const uint8_t*>(scale), static_cast<const uint8_t*>(low), n, k, groups};
    const RecordLayout layout{half != 0, static_cast<Levels>(levels)};
    const int64_t size = layout.size(k / groups / STEP), records = divide_up(n, PANEL) * groups;
    parallel_for(records, even_chunk(records, threads), threads, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) pack_record(w, layout, i / groups * PANEL, i % groups, blob + i * size);
    });
}

// reference.linear_w4a8 of q [rows, k] with rows `q_stride` apart, groups a multiple of 8 channels: out [rows, n].
// `weight` is the blob of optkit_pack_w4, `scale` is [rows, scale_groups], `bias` may be null.
OPTKIT_API void optkit_linear_w4a8(const uint8_t* q, int64_t q_stride, const float* scale, const uint8_t* weight,
                                   const float* bias, float* out, int64_t rows, int64_t n, int64_t k, int64_t groups,
                                   int64_t scale_groups, int half, int levels, int threads) {
    const RecordLayout layout{half != 0, static_cast<Levels>(levels)};
    const LinearW4A8 p{q, q_stride, scale, scale_groups, weight, layout, bias, out, n, groups, k / groups / STEP};
    linear_w4a8(p, rows, k, threads);
}
