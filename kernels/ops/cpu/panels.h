// Panels of a packed linear weight, and how threads share the work. See int8.cpp for the layout.
#pragma once

#include <algorithm>
#include <cstdint>

#include "threads.h"

namespace optkit {

constexpr int64_t PANEL = 32;            // output channels of a panel: two AVX-512 registers of int32
constexpr int64_t STEP = 4;              // input channels of a step: what vpdpbusd adds up in one lane
constexpr int64_t STEP_BYTES = PANEL * STEP;

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How the output is cut into tasks of `rows` x `panels`. Threads take them as they get free.
struct Tasks {
    int64_t rows, panels, across, count;

    // Rows of a task stay in L2 while each panel passes. Panels of a task are neighbours, and as many as make it worth
    // handing out: cores that write the same pages in turns slow each other down. All threads get equally many.
    Tasks(int64_t m, int64_t all_panels, int64_t k, int threads) {
        constexpr int64_t L2_BYTES = 384 << 10, MOST_ROWS = 128, TASK_WORK = 32 << 20;
        rows = divide_up(m, std::max(divide_up(m * k, L2_BYTES), divide_up(m, MOST_ROWS)));
        const int64_t work = all_panels * PANEL * k * (rows + 8);  // a panel is fetched in the time of 8 rows
        across = std::min(all_panels, divide_up(divide_up(work, TASK_WORK), threads) * threads);
        panels = divide_up(all_panels, across);
        across = divide_up(all_panels, panels);
        if (across < threads) rows = std::min(rows, divide_up(m, divide_up(threads, across)));
        count = divide_up(m, rows) * across;
    }

    // Tasks of so many rows and panels.
    static Tasks of(int64_t m, int64_t all_panels, int64_t rows, int64_t panels) {
        const int64_t across = divide_up(all_panels, panels);
        return Tasks(rows, panels, across, divide_up(m, rows) * across);
    }

    // Calls body(row, rows, panel, end of the panels) for each task of `m` rows and `all_panels` panels.
    template <class Body>
    void run(int64_t m, int64_t all_panels, int threads, const Body& body) const {
        parallel_for(count, 1, threads, [&](int64_t first, int64_t last) {
            for (int64_t task = first; task < last; ++task) {
                const int64_t row = task / across * rows, panel = task % across * panels;
                body(row, std::min(rows, m - row), panel, std::min(panel + panels, all_panels));
            }
        });
    }

private:
    Tasks(int64_t rows, int64_t panels, int64_t across, int64_t count)
        : rows(rows), panels(panels), across(across), count(count) {}
};

}  // namespace optkit
