// int4 linear layers on registers of 256 bits: tiles for one row and for few rows, which unpack in registers, and for
// many rows of an unpacked panel; see int4.cpp for the layout and the arithmetic. Included by the source of an
// instruction set, inside its unnamed namespace, with OPTKIT_TARGET (the function attribute) and `D`, its products of
// codes 0 to 15 and s8:
//
//     rows                          of a tile
//     Sum                           sums of 8 output channels, zero to start with
//     steps                         after which a sum must be made whole, 0: any number
//     add(sum, codes, x)            adds the products of one step
//     add_two(sum, c, x, d, y)      adds those of two
//     whole(sum)                    the int32 sums of 8 output channels

constexpr int PAIR = 2;  // registers of a tile of many rows: 16 output channels
constexpr int64_t BLOCK_STEPS = 8;  // of a tile of one row: what 16 bits hold with AVX2, the usual group

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

// Add one group's sums of 8 output channels, register c of C, of row r and the rows after it: scaled, and with MINIMUM
// what that contributes. Sums of a row and the next are PANEL apart.
template <int R, bool MINIMUM, int C, int c, int r = 0>
OPTKIT_TARGET OPTKIT_INLINE void add_scaled(float* sums, const Lanes (&a)[R][C], const GroupRows& rows, __m256 scales,
                                            __m256 minimum) {
    const int64_t at = r * rows.groups;
    const Lanes total = MINIMUM ? a[r][c] : a[r][c] + rows.start[at];
    const __m256 scale = _mm256_mul_ps(_mm256_set1_ps(rows.scale[at]), scales);
    __m256 sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps((__m256i)total), scale, _mm256_loadu_ps(sums + r * PANEL));
    if (MINIMUM) sum = _mm256_fmadd_ps(_mm256_set1_ps(rows.sums[at]), minimum, sum);
    _mm256_storeu_ps(sums + r * PANEL, sum);
    if constexpr (r + 1 < R) add_scaled<R, MINIMUM, C, c, r + 1>(sums, a, rows, scales, minimum);
}

// Fetches bytes that a later group or the next panel will read: tiles compute faster than memory answers.
OPTKIT_TARGET OPTKIT_INLINE void ask_for(const uint8_t* from, int64_t bytes) {
    constexpr int64_t LINE = 64;
    for (int64_t i = 0; i < bytes; i += LINE) __builtin_prefetch(from + i);
}

// -- few rows ----------------------------------------------------------------------------------------------

// Up to D::steps steps of 8 output channels, added to the accumulators of R rows.
template <int R>
OPTKIT_TARGET OPTKIT_INLINE void accumulate(Lanes (&a)[R][1], const uint8_t* q, int64_t stride, const uint8_t* codes,
                                            int64_t steps) {
    const __m256i mask = _mm256_set1_epi8(15);
    D::Sum sum[R] = {};
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
    for (int r = 0; r < R; ++r) a[r][0] += D::whole(sum[r]);
}

template <int R, bool MINIMUM>
OPTKIT_TARGET void few_rows(const Linear& p, const int32_t* starts, const uint8_t* record, RecordLayout layout,
                          int64_t first, int64_t row) {
    alignas(32) float sums[R * PANEL] = {};
    const uint8_t* q = p.q + row * p.q_stride;
    for (int64_t g = 0; g < p.groups; ++g, record += layout.size(p.group_steps), q += p.group_steps * STEP) {
        const GroupRows rows = rows_of(p, starts, row, g);
        const uint8_t* codes = record + layout.codes();
        ask_for(record + AHEAD_BYTES, layout.size(p.group_steps));
        for (int64_t c = 0; c < PANEL; c += COLUMNS) {
            Lanes a[R][1] = {};
            if constexpr (D::steps == 0)
                accumulate<R>(a, q, p.q_stride, codes + c * STEP, p.group_steps);
            else
                for (int64_t s = 0; s < p.group_steps; s += D::steps)
                    accumulate<R>(a, q + s * STEP, p.q_stride, codes + s / 2 * STEP_BYTES + c * STEP,
                                  std::min(D::steps, p.group_steps - s));
            const __m256 scales = widened(record, layout.half, c);
            const __m256 minimum = MINIMUM ? minimums(record, layout, scales, c) : scales;
            add_scaled<R, MINIMUM, 1, 0>(sums + c, a, rows, scales, minimum);
        }
    }
    store<R, PANEL>(sums, p, row, first);
}

// One row whose groups are whole blocks of 8 steps, with float16 scales: all 32 output channels together, so that a
// broadcast serves four registers and the sums stay in registers. SHORT: a group is one block.
template <bool MINIMUM, bool SHORT>
OPTKIT_TARGET void one_row(const Linear& p, const int32_t* starts, const uint8_t* record, RecordLayout, int64_t first,
                         int64_t row) {
    constexpr RecordLayout layout{true, MINIMUM ? Levels::minimum : Levels::symmetric};
    static_assert(D::steps == 0 || D::steps >= BLOCK_STEPS);
    constexpr int BLOCKS = PANEL / COLUMNS;
    const int64_t steps = SHORT ? BLOCK_STEPS : p.group_steps;
    const __m256i mask = _mm256_set1_epi8(15);
    const uint8_t* q = p.q + row * p.q_stride;
    const GroupRows rows = rows_of(p, starts, row, 0);
    __m256 sums[BLOCKS] = {};
    for (int64_t g = 0; g < p.groups; ++g, record += layout.size(steps)) {
        const uint8_t* codes = record + layout.codes();
        ask_for(record + AHEAD_BYTES, layout.size(steps));
        Lanes total[BLOCKS] = {};
        for (int64_t s = 0; s < steps; s += BLOCK_STEPS, q += BLOCK_STEPS * STEP) {
            D::Sum sum[BLOCKS] = {};
#pragma GCC unroll 4
            for (int64_t t = 0; t < BLOCK_STEPS; t += 2, codes += STEP_BYTES) {
                const __m256i x = broadcast(q + t * STEP), y = broadcast(q + (t + 1) * STEP);
#pragma GCC unroll 4
                for (int c = 0; c < BLOCKS; ++c) {
                    const __m256i both = (__m256i)load(codes + c * COLUMNS * STEP);
                    const __m256i second = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
                    sum[c] = D::add_two(sum[c], _mm256_and_si256(both, mask), x, second, y);
                }
            }
#pragma GCC unroll 4
            for (int c = 0; c < BLOCKS; ++c) total[c] = SHORT ? D::whole(sum[c]) : total[c] + D::whole(sum[c]);
        }
        const __m256 scale = _mm256_set1_ps(rows.scale[g]), sum_of_q = _mm256_set1_ps(rows.sums[g]);
#pragma GCC unroll 4
        for (int c = 0; c < BLOCKS; ++c) {
            if (!MINIMUM) total[c] += rows.start[g];
            const __m256 product = _mm256_mul_ps(scale, widened(record, true, c * COLUMNS));
            sums[c] = _mm256_fmadd_ps(_mm256_cvtepi32_ps((__m256i)total[c]), product, sums[c]);
            if (MINIMUM)
                sums[c] = _mm256_fmadd_ps(sum_of_q, widened(record + layout.row(), true, c * COLUMNS), sums[c]);
        }
    }
    alignas(32) float stored[PANEL];
#pragma GCC unroll 4
    for (int c = 0; c < BLOCKS; ++c) _mm256_store_ps(stored + c * COLUMNS, sums[c]);
    store<1, PANEL>(stored, p, row, first);
}

using FewTile = void (*)(const Linear&, const int32_t*, const uint8_t*, RecordLayout, int64_t, int64_t);
template <bool MINIMUM, std::size_t... R>
constexpr std::array<FewTile, D::rows> few_tiles(std::index_sequence<R...>) {
    return {few_rows<R + 1, MINIMUM>...};
}
constexpr std::array<FewTile, D::rows> FEW[2] = {few_tiles<false>(std::make_index_sequence<D::rows>()),
                                                 few_tiles<true>(std::make_index_sequence<D::rows>())};

constexpr FewTile ONE[2][2] = {{one_row<false, false>, one_row<false, true>},
                               {one_row<true, false>, one_row<true, true>}};

inline bool takes_one_row(const Linear& p, RecordLayout layout, int64_t rows) {
    return rows == 1 && layout.half && layout.levels != Levels::zero_point && p.group_steps % BLOCK_STEPS == 0;
}

// -- many rows ---------------------------------------------------------------------------------------------

// One step of 16 output channels, unpacked, added to the sums of row r and the rows after it. Rows go by recursion, not by
// a loop: gcc keeps an array in registers only where its indices are constants from the start.
template <int R, int r = 0>
OPTKIT_TARGET OPTKIT_INLINE void add_codes(D::Sum (&sum)[R][PAIR], const uint8_t* q, int64_t stride, __m256i left,
                                           __m256i right) {
    const __m256i x = broadcast(q + r * stride);
    sum[r][0] = D::add(sum[r][0], left, x);
    sum[r][1] = D::add(sum[r][1], right, x);
    if constexpr (r + 1 < R) add_codes<R, r + 1>(sum, q, stride, left, right);
}

// The sums of up to D::steps steps of 16 output channels and R rows.
template <int R>
OPTKIT_TARGET OPTKIT_INLINE void sum_codes(Lanes (&a)[R][PAIR], const uint8_t* q, int64_t stride, const int8_t* codes,
                                           int64_t steps) {
    D::Sum sum[R][PAIR];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = D::Sum{};
#pragma GCC unroll 8
    for (int64_t s = 0; s < steps; ++s, q += STEP, codes += STEP_BYTES)
        add_codes<R>(sum, q, stride, (__m256i)load(codes), (__m256i)load(codes + COLUMNS * STEP));
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) a[r][0] = D::whole(sum[r][0]), a[r][1] = D::whole(sum[r][1]);
}

// The same for a whole group. SHORT: its steps are D::steps.
template <int R, bool SHORT>
OPTKIT_TARGET OPTKIT_INLINE void sum_group(Lanes (&a)[R][PAIR], const uint8_t* q, int64_t stride, const int8_t* codes,
                                           int64_t steps) {
    if (SHORT || D::steps == 0) return sum_codes<R>(a, q, stride, codes, SHORT ? D::steps : steps);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) a[r][0] = a[r][1] = Lanes{};
    for (int64_t s = 0; s < steps; s += D::steps) {
        Lanes more[R][PAIR];
        sum_codes<R>(more, q + s * STEP, stride, codes + s * STEP_BYTES, std::min(D::steps, steps - s));
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) a[r][0] += more[r][0], a[r][1] += more[r][1];
    }
}

// `ahead`: the tile asks for the next panel, a part of it in each group.
template <int R, bool MINIMUM, bool SHORT>
OPTKIT_TARGET void many_rows(const Linear& p, const int32_t* starts, const Panel& panel, int64_t row, bool ahead) {
    alignas(32) float sums[R * PANEL] = {};
    const int64_t stride = p.q_stride, steps = SHORT ? D::steps : p.group_steps;
    const int64_t share = ahead ? panel.next_step * steps * PAIR * COLUMNS / PANEL : 0;
    const auto* next = static_cast<const uint8_t*>(panel.next);
    for (int64_t column = 0; column < PANEL && panel.first + column < p.n; column += PAIR * COLUMNS) {
        const uint8_t* q = p.q + row * stride;
        const int8_t* codes = panel.weight + column * STEP;
        const float *scale = panel.weight_scale + column, *minimum = MINIMUM ? panel.minimum + column : scale;
        GroupRows rows = rows_of(p, starts, row, 0);
        for (int64_t g = 0; g < p.groups; ++g, q += steps * STEP, codes += steps * STEP_BYTES) {
            Lanes a[R][PAIR];
            ask_for(next, share);
            next += share;
            sum_group<R, SHORT>(a, q, stride, codes, steps);
            add_scaled<R, MINIMUM, PAIR, 0>(sums + column, a, rows, _mm256_loadu_ps(scale), _mm256_loadu_ps(minimum));
            add_scaled<R, MINIMUM, PAIR, 1>(sums + column + COLUMNS, a, rows, _mm256_loadu_ps(scale + COLUMNS),
                                            _mm256_loadu_ps(minimum + COLUMNS));
            scale += PANEL, minimum += PANEL;
            ++rows.start, ++rows.scale, ++rows.sums;
        }
    }
    store<R, PANEL>(sums, p, row, panel.first);
}

using ManyTile = void (*)(const Linear&, const int32_t*, const Panel&, int64_t, bool);
template <bool MINIMUM, bool SHORT, std::size_t... R>
constexpr std::array<ManyTile, D::rows> many_tiles(std::index_sequence<R...>) {
    return {many_rows<R + 1, MINIMUM, SHORT>...};
}
template <bool MINIMUM, bool SHORT>
constexpr std::array<ManyTile, D::rows> MANY = many_tiles<MINIMUM, SHORT>(std::make_index_sequence<D::rows>());

// Tiles of nearly equal height.
inline void few_rows_of_panel(const Linear& p, const int32_t* start, const uint8_t* records, RecordLayout layout,
                              int64_t first, int64_t row, int64_t rows) {
    if (takes_one_row(p, layout, rows))
        return ONE[layout.minimum()][p.group_steps == BLOCK_STEPS](p, start, records, layout, first, row);
    for (int64_t left = divide_up(rows, D::rows); left > 0; --left) {
        const int64_t now = divide_up(rows, left);
        FEW[layout.minimum()][now - 1](p, start, records, layout, first, row);
        row += now;
        rows -= now;
    }
}

inline void many_rows_of_panel(const Linear& p, const int32_t* start, const Panel& panel, int64_t row, int64_t rows) {
    const bool is_short = D::steps != 0 && p.group_steps == D::steps;
    const auto& tiles = panel.minimum ? (is_short ? MANY<true, true> : MANY<true, false>)
                                      : (is_short ? MANY<false, true> : MANY<false, false>);
    bool ahead = true;  // in the first tile
    for (int64_t left = divide_up(rows, D::rows); left > 0; --left, ahead = false) {
        const int64_t now = divide_up(rows, left);
        tiles[now - 1](p, start, panel, row, ahead);
        row += now;
        rows -= now;
    }
}
