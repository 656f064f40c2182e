// Blocks of the output of a head, tokens by columns. Included once an instruction set; see simd.h for OPTKIT_TARGET and
// S, and heads.cpp for Heads.

constexpr int kRows = S::tile_rows;
constexpr int kWideVecs = 2 * S::tile_vecs;  // of a single token, which leaves more registers to columns

// R tokens by NV vectors of columns; of a single vector only the first `left` columns.
template <int R, int NV>
OPTKIT_TARGET void head_tile(const Heads& p, const float* x, const float* w, float* out, int left) {
    S::Vec acc[R][NV];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) acc[r][v] = S::all(0.0f);
    const bool whole = NV > 1 || left >= kLanes;
    for (int64_t i = 0; i < p.k; ++i, w += p.n) {
        S::Vec column[NV];
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) column[v] = whole ? S::load(w + v * kLanes) : S::load_some(w, left);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const S::Vec number = S::all(x[r * p.x_token + i]);
#pragma GCC unroll 8
            for (int v = 0; v < NV; ++v) acc[r][v] = S::fma(number, column[v], acc[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) {
            float* to = out + r * p.heads * p.n + v * kLanes;
            whole ? S::store(to, acc[r][v]) : S::store_some(to, acc[r][v], left);
        }
}

// Calls head_tile for a number of tokens that becomes a constant.
template <int R, int NV>
OPTKIT_TARGET void head_block(const Heads& p, int rows, const float* x, const float* w, float* out, int left) {
    if (rows == R) return head_tile<R, NV>(p, x, w, out, left);
    if constexpr (R > 1) head_block<R - 1, NV>(p, rows, x, w, out, left);
}

// The columns from `column` on for tokens [first, last), by tiles of NV vectors and then fewer. A tile of the weight
// stays in cache for all of the tokens.
template <int R, int NV>
OPTKIT_TARGET void head_columns(const Heads& p, int64_t head, int64_t first, int64_t last, int64_t column) {
    const float *x = p.x + head * p.k, *w = p.weight + head * p.k * p.n;
    float* out = p.out + head * p.n;
    for (; column < p.n && (NV == 1 || p.n - column >= NV * kLanes); column += NV * kLanes) {
        const int64_t columns = p.n - column;
        const int left = columns < NV * kLanes ? static_cast<int>(columns) : NV * kLanes;
        for (int64_t t = first; t < last; t += R) {
            const int rows = last - t < R ? static_cast<int>(last - t) : R;
            head_block<R, NV>(p, rows, x + t * p.x_token, w + column, out + t * p.heads * p.n + column, left);
        }
    }
    if constexpr (NV > 1) head_columns<R, NV / 2>(p, head, first, last, column);
}

OPTKIT_TARGET inline void head_tokens(const Heads& p, int64_t head, int64_t first, int64_t last) {
    if (last - first == 1) return head_columns<1, kWideVecs>(p, head, first, last, 0);
    head_columns<kRows, S::tile_vecs>(p, head, first, last, 0);
}

inline HeadFunctions functions() { return {head_tokens}; }
