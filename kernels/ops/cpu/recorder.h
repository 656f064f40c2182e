// Records of kernel calls for profiles: the time before and after each call of a program, in ticks.
//
// Programs are compiled twice (program.cpp): with `Recorder`, and with `NoRecorder`, which leaves no instruction behind.
// Records go to memory of the caller, allocated before the step. Nothing is formatted, allocated or locked while a step
// runs: a call costs two readings of the counter, one atomic addition and 32 bytes.
#pragma once

#include <cstdint>

namespace optkit {

// The time in ticks: the time stamp counter of x86 where it runs at one rate always, elsewhere the steady clock in
// nanoseconds. kernels/ops/cpu/recorder.py finds the length of a tick.
int64_t ticks();

// A call, or a run of calls by blocks of tokens as a whole. The layout is recorder.py's too.
struct Record {
    int64_t start, end;  // ticks
    int32_t op;          // number of the call among all calls of all programs, of the first call for a run
    int32_t thread;      // a small number for each thread of the process
    int32_t first;       // token of the block, or WHOLE_RUN
    int32_t count;       // tokens of the block, or calls of the run
};
static_assert(sizeof(Record) == 32, "the size of a record in recorder.py");

constexpr int64_t WHOLE_RUN = -1;

struct NoRecorder {
    static int64_t now() { return 0; }
    static void add(int64_t, int64_t, int64_t, int64_t) {}
};

// Appends to `capacity` records at `records`. `used` counts further ones too, which are dropped.
class Recorder {
public:
    Recorder(Record* records, int64_t capacity, int64_t* used, int64_t first_op)
        : records_(records), capacity_(capacity), used_(used), first_op_(first_op) {}

    static int64_t now() { return ticks(); }

    // From any thread: the record of call `op` of the program, which began at `start` and ends now.
    void add(int64_t start, int64_t op, int64_t first, int64_t count) const;

private:
    Record* records_;
    int64_t capacity_;
    int64_t* used_;
    int64_t first_op_;
};

}  // namespace optkit
