// Runs programs: resolves the arguments of each kernel call and calls the kernel. See program.h.
//
// signatures.h lists the kernels of the table. The caller of a kernel is made from the types of the kernel's parameters
// and reads the resolved arguments in the order of the parameters.
#include "program.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <type_traits>
#include <utility>

#include "dispatch.h"
#include "panels.h"
#include "recorder.h"
#include "scratch.h"
#include "threads.h"

namespace optkit {
namespace {

// A resolved argument as a parameter of type T: a pointer, a number, or the bits of a float.
template <class T>
T as(int64_t value) {
    if constexpr (std::is_pointer_v<T>) {
        return reinterpret_cast<T>(value);
    } else if constexpr (std::is_floating_point_v<T>) {
        T number;
        const auto bits = static_cast<int32_t>(value);
        static_assert(sizeof number == sizeof bits);
        std::memcpy(&number, &bits, sizeof number);
        return number;
    } else {
        return static_cast<T>(value);
    }
}

template <class Result, class... Parameters>
constexpr std::size_t num_parameters(Result (*)(Parameters...)) {
    return sizeof...(Parameters);
}

template <class Result, class... Parameters, std::size_t... I>
int apply(Result (*kernel)(Parameters...), const int64_t* values, std::index_sequence<I...>) {
    if constexpr (std::is_void_v<Result>) {
        kernel(as<Parameters>(values[I])...);
        return 0;
    } else {
        return kernel(as<Parameters>(values[I])...);
    }
}

template <auto kernel>
int run(const int64_t* values) {
    return apply(kernel, values, std::make_index_sequence<num_parameters(kernel)>());
}

// A kernel: its parameters, of which the number of threads is the last, and its caller.
struct Row {
    std::size_t parameters;
    int (*run)(const int64_t* values);
};

constexpr Row KERNELS[] = {
#define FUNCTION(result, name, ...)
#define KERNEL(result, name, ...) {num_parameters(optkit_##name), run<optkit_##name>},
#include "signatures.h"
#undef FUNCTION
#undef KERNEL
};

constexpr const char* SIGNATURES[] = {
#define FUNCTION(result, name, ...) "FUNCTION(" #result ", " #name ", " #__VA_ARGS__ ")",
#define KERNEL(result, name, ...) "KERNEL(" #result ", " #name ", " #__VA_ARGS__ ")",
#include "signatures.h"
#undef FUNCTION
#undef KERNEL
};

constexpr std::size_t most_parameters() {
    std::size_t most = 0;
    for (const Row& row : KERNELS) most = row.parameters > most ? row.parameters : most;
    return most;
}

constexpr int TOKENS = 0;  // among the sizes

struct Program {
    const Call* calls;
    const Argument* arguments;
    const int64_t *sizes, *inputs, *arenas;
};

// Tokens that calls are made for, and the memory of their block.
struct Block {
    int64_t first, count, memory;
};

int64_t resolve(const Program& p, const Argument& a, const Block& block) {
    switch (a.source) {
        case Source::size: return (a.index == TOKENS ? block.count : p.sizes[a.index]) * a.value;
        case Source::input: return p.inputs[a.index] + a.offset + block.first * a.row_bytes;
        case Source::arena:
            return p.arenas[a.index] + p.sizes[a.index] * a.value + a.offset + block.first * a.row_bytes;
        case Source::block: return block.memory + block.count * a.value + a.offset;
        default: return a.value;
    }
}

int run_call(const Program& p, const Call& call, const Block& block, int threads) {
    int64_t values[most_parameters()];
    const Row& row = KERNELS[call.op];
    const std::size_t last = row.parameters - 1;
    for (std::size_t i = 0; i < last; ++i) values[i] = resolve(p, p.arguments[call.first + i], block);
    values[last] = threads;
    return row.run(values);
}

// run_call of the call `number` of the program, with a record.
template <class Records>
int run_recorded(const Program& p, int64_t number, const Block& block, int threads, const Records& records) {
    const int64_t start = Records::now();
    const int failed = run_call(p, p.calls[number], block, threads);
    records.add(start, number, block.first, block.count);
    return failed;
}

// The calls of the run that starts at call `number`, for one block of `tokens` tokens after another, each with
// `token_bytes` of memory a token. Gives the first call that met an index out of range, or the number of calls.
template <class Records>
int64_t run_blocks(const Program& p, int64_t number, int64_t tokens, int64_t token_bytes, int threads,
                   const Records& records) {
    const int64_t count = p.calls[number].run, all = p.sizes[TOKENS], start = Records::now();
    std::atomic<int64_t> failed{count};
    parallel_for(divide_up(all, tokens), 1, threads, [&](int64_t first, int64_t last) {
        thread_local GrowingMemory scratch;
        const auto memory = reinterpret_cast<int64_t>(scratch.at_least<char>(tokens * token_bytes));
        for (; first < last; ++first) {
            const Block block{first * tokens, std::min(tokens, all - first * tokens), memory};
            for (int64_t i = 0; i < failed; ++i)
                if (run_recorded(p, number + i, block, 1, records)) failed = i;
        }
    });
    records.add(start, number, WHOLE_RUN, count);
    return failed;
}

// The result of optkit_run_program.
template <class Records>
int64_t run_program(const Program& p, int64_t count, const Block& all, int64_t block_tokens, int64_t token_bytes,
                    int threads, const Records& records) {
    for (int64_t i = 0; i < count;) {
        if (block_tokens && p.calls[i].run > 1) {
            const int64_t failed = run_blocks(p, i, block_tokens, token_bytes, threads, records);
            if (failed < p.calls[i].run) return i + failed + 1;
            i += p.calls[i].run;
        } else {
            if (run_recorded(p, i, all, threads, records)) return i + 1;
            ++i;
        }
    }
    return 0;
}

}  // namespace
}  // namespace optkit

// The entry `index` of signatures.h as it was compiled, or null after the last.
OPTKIT_API const char* optkit_signature(int index) {
    constexpr int COUNT = sizeof optkit::SIGNATURES / sizeof optkit::SIGNATURES[0];
    return index >= 0 && index < COUNT ? optkit::SIGNATURES[index] : nullptr;
}

// Runs `count` calls, which are whole runs. Gives 0, or 1 + the index of the call that met an index out of range; what
// follows was not run. Runs of several calls take blocks of `block_tokens` tokens, with `token_bytes` of memory a token,
// or all tokens at once with the memory at `block_memory` where `block_tokens` is 0.
OPTKIT_API int64_t optkit_run_program(const void* calls, int64_t count, const void* arguments, const int64_t* sizes,
                                      const int64_t* inputs, const int64_t* arenas, void* block_memory,
                                      int64_t block_tokens, int64_t token_bytes, int threads) {
    using namespace optkit;
    const Program p{static_cast<const Call*>(calls), static_cast<const Argument*>(arguments), sizes, inputs, arenas};
    const Block all{0, sizes[TOKENS], reinterpret_cast<int64_t>(block_memory)};
    return run_program(p, count, all, block_tokens, token_bytes, threads, NoRecorder{});
}

// optkit_run_program with a record of each call in `capacity` records at `records`, of which `used` are in use before and
// after. `first_op` is the number of the first call.
OPTKIT_API int64_t optkit_run_program_recorded(const void* calls, int64_t count, const void* arguments,
                                               const int64_t* sizes, const int64_t* inputs, const int64_t* arenas,
                                               void* block_memory, int64_t block_tokens, int64_t token_bytes,
                                               int threads, void* records, int64_t capacity, int64_t* used,
                                               int64_t first_op) {
    using namespace optkit;
    const Program p{static_cast<const Call*>(calls), static_cast<const Argument*>(arguments), sizes, inputs, arenas};
    const Block all{0, sizes[TOKENS], reinterpret_cast<int64_t>(block_memory)};
    const Recorder recorder(static_cast<Record*>(records), capacity, used, first_op);
    return run_program(p, count, all, block_tokens, token_bytes, threads, recorder);
}
