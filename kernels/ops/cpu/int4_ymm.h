// int4 linear layers on registers of 256 bits: tiles for few rows, which unpack in registers, and for many rows of an
// unpacked panel; see int4.cpp for the layout and the arithmetic. Included by the source of an instruction set, inside its
// unnamed namespace, with OPTKIT_TARGET (the function attribute) and `D`, its products of codes 0 to 15 and s8:
//
//     rows                          of a tile
//     steps                         after which a sum must be made whole, 0: any number
//     add(sum, codes, x)            adds the products of one step
//     add_two(sum, c, x, d, y)      adds those of two
//     whole(sum)                    the int32 sums of 8 output channels

constexpr int PAIR = 2;  // registers of a tile of many rows: 16 output channels

// -- scales ----------------------------------------------------------------------------------------------

// The 8 scales or minimums from `column` on of the 32 at `at`.
OPTKIT_TARGET OPTKIT_INLINE __m256 widened(const uint8_t* at, bool half, int64_t column) {
    if (!half) return _mm256_loadu_ps(reinterpret_cast<const float*>(at) + column);
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at + 2 * column)));
}

// The 8 minimums from `column` on of a record, whose scales there are `scale`; see widen_minimums.
OPTKIT_TARGET OPTKIT_INLINE __m256 minimums(const uint8_t* record, RecordLayout layout, __m256 scale, int64_t column) {
    const uint8_t* low = record + layout.row();
    if (layout.levels == Levels::minimum) return widened(low, layout.half, column);
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(low + column));
    const __m256 zero = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
    return _mm256_mul_ps(_mm256_sub_ps(_mm256_setzero_ps(), zero), scale);
}

// -- what both kinds of tiles share ------------------------------------------------------------------------

// What R rows share in one group: pointers to the first row's, the others' are `groups` apart.
struct GroupRows {
    const int32_t* start;
    const float* scale;
    const float* sums;
    int64_t groups;
};

OPTKIT_INLINE GroupRows rows_of(const Linear& p, const int32_t* start, int64_t row, int64_t g) {
    const int64_t at = row * p.groups + g;
    return {start + at, p.scale + at, p.sums + at, p.groups};
}

// Add one group's accumulators of 8 output channels, scaled, and with `minimum` what that contributes.
template <int R, bool MINIMUM>
OPTKIT_TARGET OPTKIT_INLINE void add_scaled(float* sums, int64_t stride, const Lanes (&a)[R], const GroupRows& rows,
                                            __m256 scales, __m256 minimum) {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
        const Lanes total = MINIMUM ? a[r] : a[r] + rows.start[r * rows.groups];
        const __m256 scale = _mm256_mul_ps(_mm256_set1_ps(rows.scale[r * rows.groups]), scales);
        __m256 sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps((__m256i)total), scale, _mm256_loadu_ps(sums + r * stride));
        if (MINIMUM) sum = _mm256_fmadd_ps(_mm256_set1_ps(rows.sums[r * rows.groups]), minimum, sum);
        _mm256_storeu_ps(sums + r * stride, sum);
    }
}

// -- few rows ----------------------------------------------------------------------------------------------

// Up to D::steps steps of 8 output channels, added to the accumulators of R rows.
template <int R>
OPTKIT_TARGET OPTKIT_INLINE void accumulate(Lanes (&a)[R], const uint8_t* q, int64_t stride, const uint8_t* codes,
                                            int64_t steps) {
    const __m256i mask = _mm256_set1_epi8(15);
    Lanes sum[R] = {};
    for (int64_t s = 0; s < steps; s += 2, q += 2 * STEP, codes += STEP_BYTES) {
        const __m256i both = (__m256i)load(codes);
        const __m256i first = _mm256_and_si256(both, mask), second = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            const __m256i x = broadcast(q + r * stride), y = broadcast(q + r * stride + STEP);
            sum[r] = D::add_two(sum[r], first, x, second, y);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) a[r] += D::whole(sum[r]);
}

template <int R, bool MINIMUM>
OPTKIT_TARGET void few_rows(const Linear& p, const int32_t* starts, const uint8_t* record, RecordLayout layout,
                          int64_t first, int64_t row) {
    alignas(32) float sums[R * PANEL] = {};
    const uint8_t* q = p.q + row * p.q_stride;
    for (int64_t g = 0; g < p.groups; ++g, record += layout.size(p.group_steps), q += p.group_steps * STEP) {
        const GroupRows rows = rows_of(p, starts, row, g);
        const uint8_t* codes = record + layout.codes();
        for (int64_t c = 0; c < PANEL; c += COLUMNS) {
            Lanes a[R] = {};
            if constexpr (D::steps == 0)
                accumulate<R>(a, q, p.q_stride, codes + c * STEP, p.group_steps);
            else
                for (int64_t s = 0; s < p.group_steps; s += D::steps)
                    accumulate<R>(a, q + s * STEP, p.q_stride, codes + s / 2 * STEP_BYTES + c * STEP,
                                  std::min(D::steps, p.group_steps - s));
            const __m256 scales = widened(record, layout.half, c);
            const __m256 minimum = MINIMUM ? minimums(record, layout, scales, c) : scales;
            add_scaled<R, MINIMUM>(sums + c, PANEL, a, rows, scales, minimum);
        }
    }
    store<R, PANEL>(sums, p, row, first);
}

using FewTile = void (*)(const Linear&, const int32_t*, const uint8_t*, RecordLayout, int64_t, int64_t);
template <bool MINIMUM, std::size_t... R>
constexpr std::array<FewTile, D::rows> few_tiles(std::index_sequence<R...>) {
    return {few_rows<R + 1, MINIMUM>...};
}
constexpr std::array<FewTile, D::rows> FEW[2] = {few_tiles<false>(std::make_index_sequence<D::rows>()),
                                                 few_tiles<true>(std::make_index_sequence<D::rows>())};

// -- many rows ---------------------------------------------------------------------------------------------

// Up to D::steps steps of 16 output channels, unpacked, added to the accumulators of R rows.
template <int R>
OPTKIT_TARGET OPTKIT_INLINE void accumulate_codes(Lanes (&a)[PAIR][R], const uint8_t* q, int64_t stride,
                                                  const int8_t* codes, int64_t steps) {
    Lanes sum[PAIR][R] = {};
#pragma GCC unroll 8
    for (int64_t s = 0; s < steps; ++s, q += STEP, codes += STEP_BYTES) {
        const __m256i left = (__m256i)load(codes), right = (__m256i)load(codes + COLUMNS * STEP);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            const __m256i x = broadcast(q + r * stride);
            sum[0][r] = D::add(sum[0][r], left, x);
            sum[1][r] = D::add(sum[1][r], right, x);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
        a[0][r] += D::whole(sum[0][r]);
        a[1][r] += D::whole(sum[1][r]);
    }
}

// One group of 16 output channels from `column` on; `codes` are the group's first there.
template <int R, bool MINIMUM>
OPTKIT_TARGET OPTKIT_INLINE void add_group(float* sums, const Linear& p, const Panel& panel, const GroupRows& rows,
                                           const uint8_t* q, const int8_t* codes, int64_t at) {
    Lanes a[PAIR][R] = {};
    if constexpr (D::steps == 0)
        accumulate_codes<R>(a, q, p.q_stride, codes, p.group_steps);
    else if (p.group_steps == D::steps)
        accumulate_codes<R>(a, q, p.q_stride, codes, D::steps);
    else
        for (int64_t s = 0; s < p.group_steps; s += D::steps)
            accumulate_codes<R>(a, q + s * STEP, p.q_stride, codes + s * STEP_BYTES,
                                std::min(D::steps, p.group_steps - s));
#pragma GCC unroll 2
    for (int c = 0; c < PAIR; ++c) {
        const __m256 scales = _mm256_loadu_ps(panel.weight_scale + at + c * COLUMNS);
        const __m256 minimum = MINIMUM ? _mm256_loadu_ps(panel.minimum + at + c * COLUMNS) : scales;
        add_scaled<R, MINIMUM>(sums + c * COLUMNS, PANEL, a[c], rows, scales, minimum);
    }
}

template <int R, bool MINIMUM>
OPTKIT_TARGET void many_rows(const Linear& p, const int32_t* starts, const Panel& panel, int64_t row) {
    alignas(32) float sums[R * PANEL] = {};
    for (int64_t column = 0; column < PANEL && panel.first + column < p.n; column += PAIR * COLUMNS) {
        const uint8_t* q = p.q + row * p.q_stride;
        const int8_t* codes = panel.weight + column * STEP;
        for (int64_t g = 0; g < p.groups; ++g, q += p.group_steps * STEP, codes += p.group_steps * STEP_BYTES)
            add_group<R, MINIMUM>(sums + column, p, panel, rows_of(p, starts, row, g), q, codes, g * PANEL + column);
    }
    store<R, PANEL>(sums, p, row, panel.first);
}

using ManyTile = void (*)(const Linear&, const int32_t*, const Panel&, int64_t);
template <bool MINIMUM, std::size_t... R>
constexpr std::array<ManyTile, D::rows> many_tiles(std::index_sequence<R...>) {
    return {many_rows<R + 1, MINIMUM>...};
}
constexpr std::array<ManyTile, D::rows> MANY[2] = {many_tiles<false>(std::make_index_sequence<D::rows>()),
                                                   many_tiles<true>(std::make_index_sequence<D::rows>())};

// Tiles of nearly equal height.
inline void few_rows_of_panel(const Linear& p, const int32_t* start, const uint8_t* records, RecordLayout layout,
                              int64_t first, int64_t row, int64_t rows) {
    for (int64_t left = divide_up(rows, D::rows); left > 0; --left) {
        const int64_t now = divide_up(rows, left);
        FEW[layout.minimum()][now - 1](p, start, records, layout, first, row);
        row += now;
        rows -= now;
    }
}

inline void many_rows_of_panel(const Linear& p, const int32_t* start, const Panel& panel, int64_t row, int64_t rows) {
    for (int64_t left = divide_up(rows, D::rows); left > 0; --left) {
        const int64_t now = divide_up(rows, left);
        MANY[panel.minimum != nullptr][now - 1](p, start, panel, row);
        row += now;
        rows -= now;
    }
}
