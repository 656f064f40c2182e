// Runs programs: resolves the arguments of each kernel call and calls the kernel. See program.h.
//
// signatures.h lists the kernels of the table. The caller of a kernel is made from the types of the kernel's parameters
// and reads the resolved arguments in the order of the parameters.
#include "program.h"

#include <cstring>
#include <type_traits>
#include <utility>

#include "dispatch.h"

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

int64_t resolve(const Argument& a, const int64_t* sizes, const int64_t* inputs, const int64_t* arenas) {
    switch (a.source) {
        case Source::size: return sizes[a.index] * a.value;
        case Source::input: return inputs[a.index] + a.offset;
        case Source::arena: return arenas[a.index] + sizes[a.index] * a.value + a.offset;
        default: return a.value;
    }
}

}  // namespace
}  // namespace optkit

// The entry `index` of signatures.h as it was compiled, or null after the last.
OPTKIT_API const char* optkit_signature(int index) {
    constexpr int COUNT = sizeof optkit::SIGNATURES / sizeof optkit::SIGNATURES[0];
    return index >= 0 && index < COUNT ? optkit::SIGNATURES[index] : nullptr;
}

// Runs `count` calls. Gives 0, or 1 + the index of the call that met an index out of range; what follows was not run.
OPTKIT_API int64_t optkit_run_program(const void* calls, int64_t count, const void* arguments, const int64_t* sizes,
                                      const int64_t* inputs, const int64_t* arenas, int threads) {
    const auto* call = static_cast<const optkit::Call*>(calls);
    const auto* given = static_cast<const optkit::Argument*>(arguments);
    int64_t values[optkit::most_parameters()];
    for (int64_t i = 0; i < count; ++i) {
        const optkit::Row& row = optkit::KERNELS[call[i].op];
        const std::size_t last = row.parameters - 1;
        for (std::size_t a = 0; a < last; ++a)
            values[a] = optkit::resolve(given[call[i].first + a], sizes, inputs, arenas);
        values[last] = threads;
        if (row.run(values)) return i + 1;
    }
    return 0;
}
