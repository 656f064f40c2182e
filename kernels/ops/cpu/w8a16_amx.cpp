// int8 linear layers of float activations on bfloat16 tiles (AMX); see int8.cpp for the packed weight.
//
// Activations are rounded to bfloat16 once for all panels. Of a panel a thread makes the tiles that tdpbf16ps wants:
// code * scale, rounded to bfloat16, 32 input channels x 16 output channels, pairs of channels side by side. All rows
// of the task then pass over the panel's tiles. Products and sums are float32 within the tile unit, over all input
// channels, so nothing goes to memory between groups of scales: in groups of 32 an int8 tile would be stored, scaled
// and added for each product.
//
// 32 rows x one panel are 4 tiles of sums, 2 of activations and 2 of weights: 4 products for 4 loads. The sums start
// with the bias.
#include "bf16.h"

#include <array>
#include <cstring>

#include "amx_tiles.h"
#include "simd.h"
#include "vnni_tile.h"

#ifdef OPTKIT_AMX

namespace optkit {
namespace {

#define OPTKIT_TARGET OPTKIT_AMX
using S = Avx512;
#include "vector_math.h"
#include "activations.h"
#undef OPTKIT_TARGET

constexpr int64_t TILE_CHANNELS = 32, TILE_STEPS = TILE_CHANNELS / STEP;  // input channels of a tile
constexpr int64_t TILE_VALUES = TILE_BYTES / 2 * TILE_ROWS;               // of a tile of weights
constexpr int64_t HALF = PANEL / 2;                                       // output channels of a tile

// The places in a step's 64 bytes, [16 output channels][4 input channels], of 8 output channels and a pair of input
// channels: byte 0 of each lane. The other bytes stay those of MAGIC.
struct Places {
    alignas(64) uint8_t of[2][2][64];  // [pair][lower or upper 8 output channels]
};

constexpr Places all_places() {
    Places places{};
    for (int pair = 0; pair < 2; ++pair)
        for (int upper = 0; upper < 2; ++upper)
            for (int lane = 0; lane < 16; ++lane)
                places.of[pair][upper][4 * lane] = static_cast<uint8_t>((8 * upper + lane / 2) * 4 + 2 * pair + lane % 2);
    return places;
}

constexpr Places PLACES = all_places();
constexpr uint64_t LOWEST_BYTES = 0x1111111111111111;  // byte 0 of each lane
constexpr int32_t MAGIC = 0x4b000000;                  // 2^23 as a float, whose lowest byte counts ones
constexpr float MAGIC_ZERO = 8388608.0f + 128.0f;

// 16 scales as those of the lower or upper 8 output channels, each twice.
struct Doubled {
    __m512 of[2];
};

OPTKIT_AMX OPTKIT_INLINE Doubled doubled(__m512 all) {
    alignas(64) static constexpr int32_t lanes[2][16] = {{0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7},
                                                         {8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15}};
    return {{_mm512_permutexvar_ps(_mm512_loadu_si512(lanes[0]), all),
             _mm512_permutexvar_ps(_mm512_loadu_si512(lanes[1]), all)}};
}

// code * scale of 16 codes, exact before the product.
OPTKIT_AMX OPTKIT_INLINE __m512 dequantized(__m512i codes, int pair, int upper, const Doubled& scale) {
    const __m512i place = _mm512_loadu_si512(PLACES.of[pair][upper]);
    const __m512i bits = _mm512_mask_permutexvar_epi8(_mm512_set1_epi32(MAGIC), LOWEST_BYTES, place, codes);
    return _mm512_mul_ps(_mm512_sub_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(MAGIC_ZERO)), scale.of[upper]);
}

// One step's 16 output channels: two rows of a tile.
OPTKIT_AMX OPTKIT_INLINE void dequantize_step(const int8_t* w, const Doubled& scale, uint16_t* rows) {
    const __m512i codes = _mm512_xor_si512(_mm512_loadu_si512(w), _mm512_set1_epi8(-128));  // -128 .. 127 from 0 on
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair) {
        const __m512 lower = dequantized(codes, pair, 0, scale), upper = dequantized(codes, pair, 1, scale);
        _mm512_storeu_si512(rows + pair * 2 * HALF, to_bf16(upper, lower));
    }
}

// Makes the tiles of a panel, [2][16][16][2] for 32 input channels, one after another from tile `first` on.
class Dequantizer {
public:
    OPTKIT_AMX Dequantizer(const Panel& panel, const Linear& p, int64_t first)
        : panel_(panel), group_steps_(p.group_steps), steps_(p.steps), s_(first * TILE_STEPS),
          w_(panel.weight + s_ * STEP_BYTES) {
        group_ = s_ / group_steps_;
        begin_group();
    }

    // The next tiles. Channels past the last step are zeros.
    OPTKIT_AMX OPTKIT_INLINE void next(uint16_t* tiles) {
        constexpr int64_t STEP_VALUES = 4 * HALF;  // two rows of a tile
        const int64_t end = std::min(s_ + TILE_STEPS, steps_), missing = s_ + TILE_STEPS - end;
        while (s_ < end) {
            if (s_ == group_end_) {
                ++group_;
                begin_group();
            }
            for (const int64_t stop = std::min(end, group_end_); s_ < stop; ++s_, w_ += STEP_BYTES, tiles += STEP_VALUES) {
                __builtin_prefetch(w_ + AHEAD, 0, 2);
                __builtin_prefetch(w_ + AHEAD + STEP_BYTES / 2, 0, 2);
                dequantize_step(w_, scale_[0], tiles);
                dequantize_step(w_ + STEP_BYTES / 2, scale_[1], tiles + TILE_VALUES);
            }
        }
        if (missing == 0) return;
        std::memset(tiles, 0, missing * STEP_VALUES * sizeof *tiles);
        std::memset(tiles + TILE_VALUES, 0, missing * STEP_VALUES * sizeof *tiles);
    }

private:
    static constexpr int64_t AHEAD = 4096;  // bytes; without it weights from the last-level cache take three times as long

    OPTKIT_AMX OPTKIT_INLINE void begin_group() {
        group_end_ = (group_ + 1) * group_steps_;
        scale_[0] = doubled(scales<0>(panel_, group_));
        scale_[1] = doubled(scales<1>(panel_, group_));
    }

    const Panel& panel_;
    int64_t group_steps_, steps_, s_, group_, group_end_;
    const int8_t* w_;
    Doubled scale_[2];
};

// The sums of up to 32 rows x one panel, in tiles 0 to 3. With TWO there are more than 16 rows.
template <bool TWO>
struct Block {
    // What is at `from`, or zeros.
    OPTKIT_AMX OPTKIT_INLINE static void start(const float* from, int64_t stride) {
        const int64_t bytes = stride * 4;
        if (!from) {
            _tile_zero(0);
            _tile_zero(1);
            if constexpr (TWO) _tile_zero(2);
            if constexpr (TWO) _tile_zero(3);
            return;
        }
        _tile_loadd(0, from, bytes);
        _tile_loadd(1, from + HALF, bytes);
        if constexpr (TWO) _tile_loadd(2, from + TILE_ROWS * stride, bytes);
        if constexpr (TWO) _tile_loadd(3, from + TILE_ROWS * stride + HALF, bytes);
    }

    // Add the products of 32 input channels. Activations stay in the first cache while the panels of a task pass, and
    // weights pass through: the hint of `stream`.
    OPTKIT_AMX OPTKIT_INLINE static void add(const uint16_t* x, int64_t stride, const uint16_t* w) {
        _tile_stream_loadd(6, w, TILE_BYTES);
        _tile_loadd(4, x, stride * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_stream_loadd(7, w + TILE_VALUES, TILE_BYTES);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (TWO) {
            _tile_loadd(5, x + TILE_ROWS * stride, stride * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }

    OPTKIT_AMX OPTKIT_INLINE static void store(float* to, int64_t stride) {
        const int64_t bytes = stride * 4;
        _tile_stored(0, to, bytes);
        _tile_stored(1, to + HALF, bytes);
        if constexpr (TWO) _tile_stored(2, to + TILE_ROWS * stride, bytes);
        if constexpr (TWO) _tile_stored(3, to + TILE_ROWS * stride + HALF, bytes);
    }
};

constexpr int64_t MOST_PANELS = 9, MOST_TILES = 18, MOST_ROWS = 512;  // of a task, and tiles of input channels at a time

// Activations in bfloat16, [parts][m][each tiles of 32 channels]: a task takes part after part of the input channels, whose
// activations and tiles of weights stay in the second-level cache. Rows of a part are a few lines apart from each other, where
// rows of all channels would often be whole pages apart, and in each other's way in the first cache.
struct Rows {
    uint16_t* x;
    int64_t m, tiles, each;

    Rows(const Linear& p, int64_t m, GrowingMemory& memory) : m(m), tiles(divide_up(p.steps, TILE_STEPS)) {
        each = divide_up(tiles, divide_up(tiles, MOST_TILES));
        x = memory.at_least<uint16_t>(divide_up(tiles, each) * m * stride());
    }

    int64_t stride() const { return each * TILE_CHANNELS; }

    // The 32 channels of tile `t` in a row.
    uint16_t* at(int64_t row, int64_t t) const {
        return x + (t / each * m + row) * stride() + t % each * TILE_CHANNELS;
    }
};

// Where the sums of 32 rows x one panel are.
struct Place {
    float* sums;
    int64_t stride;
};

// A part of the output: rows [row, row + rows) of some panels. What happens to sums is up to the kinds of tasks:
//   count()             panels of the task
//   panel(j)            the j-th
//   place(j, r)         where its sums are, from row r of the task on
//   finish(j, r, rows)  called when its sums and those of the panels before are complete, from row r on
struct Task {
    const Linear& p;
    int64_t row, rows;
};

// Panels [from, to) of the output. A last panel of fewer channels is added up elsewhere.
struct PlainTask : Task {
    int64_t from, to;
    float* rest = nullptr;

    PlainTask(const Linear& p, int64_t row, int64_t rows, int64_t from, int64_t to)
        : Task{p, row, rows}, from(from), to(to) {
        thread_local GrowingMemory memory;
        if (to * PANEL > p.n) rest = memory.at_least<float>(rows * PANEL);
    }

    int64_t count() const { return to - from; }
    int64_t panel(int64_t j) const { return from + j; }
    Place place(int64_t j, int64_t r) const {
        const bool whole = (from + j + 1) * PANEL <= p.n;
        return whole ? Place{p.out + (row + r) * p.n + (from + j) * PANEL, p.n} : Place{rest + r * PANEL, PANEL};
    }
    OPTKIT_AMX void finish(int64_t j, int64_t r, int64_t now) const {
        if (!rest || j + 1 < count()) return;
        const int64_t first = (to - 1) * PANEL, columns = p.n - first;
        for (const int64_t end = r + now; r < end; ++r)
            std::memcpy(p.out + (row + r) * p.n + first, rest + r * PANEL, columns * sizeof(float));
    }
};

// Panels [from, to) of the gates and those of the ups, which become act(gate) * up in bfloat16.
template <Activation activation>
struct GatedTask : Task {
    int64_t from, to;
    const Rows& out;
    bool at_once;  // all input channels: sums of a gate and its up are used before others are made
    float* sums;   // [count()][rows][PANEL]; at once: [2][32][PANEL]

    GatedTask(const Linear& p, int64_t row, int64_t rows, int64_t from, int64_t to, const Rows& out)
        : Task{p, row, rows}, from(from), to(to), out(out), at_once(p.steps <= MOST_TILES * TILE_STEPS) {
        thread_local GrowingMemory memory;
        sums = memory.at_least<float>((at_once ? 2 * TILES_ROWS : count() * rows) * PANEL);
    }

    int64_t count() const { return 2 * (to - from); }
    int64_t panel(int64_t j) const { return from + j / 2 + (j % 2 ? p.n / 2 / PANEL : 0); }
    Place place(int64_t j, int64_t r) const {
        return {sums + (at_once ? j % 2 * TILES_ROWS : j * rows + r) * PANEL, PANEL};
    }
    OPTKIT_AMX void finish(int64_t j, int64_t r, int64_t now) const {
        if (j % 2 == 0) return;
        const float *gate = place(j - 1, r).sums, *up = place(j, r).sums;
        uint16_t* to = out.at(row + r, from + j / 2);  // a panel of channels is a tile of them
        for (int64_t i = 0; i < now; ++i, gate += PANEL, up += PANEL, to += out.stride()) {
            const __m512 lower = S::mul(activated<activation>(load(gate)), load(up));
            const __m512 upper = S::mul(activated<activation>(load(gate + HALF)), load(up + HALF));
            _mm512_storeu_si512(to, to_bf16(upper, lower));
        }
    }
};

// The bias of a panel, zeros past the last channel.
struct Bias {
    alignas(64) float of[PANEL] = {};

    Bias(const Linear& p, int64_t panel) {
        const int64_t first = panel * PANEL;
        if (p.bias) std::memcpy(of, p.bias + first, std::min(PANEL, p.n - first) * sizeof(float));
        tiles_and_memory_agree();
    }
};

// One panel's products of tiles [first, last) of input channels, for a block of rows.
template <bool TWO>
OPTKIT_AMX void add_products(const Linear& p, const Rows& a, int64_t panel, int64_t first, int64_t last, const uint16_t* w,
                             int64_t row, const Place& to) {
    const Bias bias(p, panel);
    first ? Block<TWO>::start(to.sums, to.stride) : Block<TWO>::start(p.bias ? bias.of : nullptr, 0);
    const uint16_t* x = a.at(row, first);
    for (int64_t t = first; t < last; ++t, x += TILE_CHANNELS, w += 2 * TILE_VALUES) Block<TWO>::add(x, a.stride(), w);
    Block<TWO>::store(to.sums, to.stride);
}

// Tiles [first, last) of input channels: first as tiles of all panels, which then pass by each block of rows.
template <class Kind>
OPTKIT_AMX void run_channels(const Kind& task, const Rows& a, int64_t first, int64_t last) {
    thread_local GrowingMemory scale_memory, tile_memory;
    const Linear& p = task.p;
    const int64_t panel_values = (last - first) * 2 * TILE_VALUES;
    auto* tiles = tile_memory.at_least<uint16_t>(task.count() * panel_values);
    for (int64_t j = 0; j < task.count(); ++j) {
        const Panel panel = panel_of(p, task.panel(j), task.rows, scale_memory);
        Dequantizer dequantizer(panel, p, first);
        for (int64_t t = first; t < last; ++t) dequantizer.next(tiles + j * panel_values + (t - first) * 2 * TILE_VALUES);
    }
    for (int64_t r = 0; r < task.rows; r += TILES_ROWS) {
        const int64_t now = std::min(task.rows - r, TILES_ROWS);
        configure_tiles(now);
        for (int64_t j = 0; j < task.count(); ++j) {
            const auto add = now > TILE_ROWS ? add_products<true> : add_products<false>;
            add(p, a, task.panel(j), first, last, tiles + j * panel_values, task.row + r, task.place(j, r));
            tiles_and_memory_agree();
            if (last * TILE_STEPS >= p.steps) task.finish(j, r, now);
        }
    }
}

// A task of one block of rows: tiles of weights are multiplied as soon as they are made, so that reading packed weights,
// making tiles and multiplying go on side by side.
template <bool TWO, class Kind>
OPTKIT_AMX void run_block(const Kind& task, const Rows& a) {
    constexpr int64_t RING = 4, LAG = RING - 1;  // tiles on their way: one that was just written would be waited for
    alignas(64) uint16_t ring[RING][2 * TILE_VALUES];
    thread_local GrowingMemory scale_memory;
    const Linear& p = task.p;
    configure_tiles(task.rows);
    for (int64_t j = 0; j < task.count(); ++j) {
        const Panel panel = panel_of(p, task.panel(j), task.rows, scale_memory);
        const Bias bias(p, task.panel(j));
        const Place to = task.place(j, 0);
        Dequantizer dequantizer(panel, p, 0);
        Block<TWO>::start(p.bias ? bias.of : nullptr, 0);
        for (int64_t t = 0; t < a.tiles + LAG; ++t) {
            if (t < a.tiles) dequantizer.next(ring[t % RING]);
            tiles_and_memory_agree();
            if (t >= LAG) Block<TWO>::add(a.at(task.row, t - LAG), a.stride(), ring[(t - LAG) % RING]);
            tiles_and_memory_agree();
        }
        Block<TWO>::store(to.sums, to.stride);
        tiles_and_memory_agree();
        task.finish(j, 0, task.rows);
    }
}

template <class Kind>
OPTKIT_AMX void run_task(const Kind& task, const Rows& a) {
    if (task.rows <= TILES_ROWS) {
        task.rows > TILE_ROWS ? run_block<true>(task, a) : run_block<false>(task, a);
    } else {
        for (int64_t t = 0; t < a.tiles; t += a.each) run_channels(task, a, t, std::min(t + a.each, a.tiles));
    }
    _tile_release();
}

// Row `row` of the activations as bfloat16.
OPTKIT_AMX void round_row(const Bf16Input& input, int64_t row, const Rows& to) {
    const float* x = input.x + row * input.x_stride;
    for (int64_t t = 0, i = 0; t < to.tiles; ++t, i += TILE_CHANNELS) round_32(x + i, input.k - i, to.at(row, t));
}

Rows rounded(const Bf16Input& input, const Linear& layer, int64_t m, int threads) {
    thread_local GrowingMemory memory;
    const Rows rows(layer, m, memory);
    parallel_for(m, even_chunk(m, threads), m > TILES_ROWS ? threads : 1, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) round_row(input, row, rows);
    });
    return rows;
}

// How threads share `m` rows and `panels` panels.
Tasks tasks_of(int64_t m, int64_t panels, int64_t most_panels, int threads) {
    const int64_t rows = divide_up(divide_up(m, divide_up(m, MOST_ROWS)), TILES_ROWS) * TILES_ROWS;
    // One block of rows waits for memory: a task begins without what was fetched ahead, so there are as few as threads.
    const int64_t each = m <= TILES_ROWS ? divide_up(panels, threads) : std::min(most_panels, divide_up(panels, 2 * threads));
    return Tasks::of(m, panels, rows, each);
}

void multiply_rows(const Rows& a, const Linear& layer, int64_t m, int threads) {
    const int64_t panels = divide_up(layer.n, PANEL);
    tasks_of(m, panels, MOST_PANELS, threads)
        .run(m, panels, threads, [&](int64_t row, int64_t rows, int64_t from, int64_t to) {
            run_task(PlainTask(layer, row, rows, from, to), a);
        });
}

template <Activation activation>
void gated_mlp(const Bf16Input& input, const Linear& gate_up, const Linear& down, int64_t m, int threads) {
    thread_local GrowingMemory memory;
    const Rows a = rounded(input, gate_up, m, threads), hidden(down, m, memory);
    const int64_t panels = gate_up.n / 2 / PANEL;
    tasks_of(m, panels, MOST_PANELS / 2, threads)
        .run(m, panels, threads, [&](int64_t row, int64_t rows, int64_t from, int64_t to) {
            run_task(GatedTask<activation>(gate_up, row, rows, from, to, hidden), a);
        });
    multiply_rows(hidden, down, m, threads);
}

}  // namespace

void linear_w8a16_amx(const Bf16Input& input, const Linear& layer, int64_t m, int threads) {
    multiply_rows(rounded(input, layer, m, threads), layer, m, threads);
}

void gated_mlp_amx(const Bf16Input& input, const Linear& gate_up, Activation activation, const Linear& down, int64_t m,
                   int threads) {
    switch (activation) {
        case Activation::silu: return gated_mlp<Activation::silu>(input, gate_up, down, m, threads);
        case Activation::gelu: return gated_mlp<Activation::gelu>(input, gate_up, down, m, threads);
        case Activation::gelu_tanh: return gated_mlp<Activation::gelu_tanh>(input, gate_up, down, m, threads);
    }
}

}  // namespace optkit

#endif
