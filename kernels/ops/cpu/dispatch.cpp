// The choice of the instruction set for the kernels; see dispatch.h.
#include "dispatch.h"

#include <atomic>

#include "cpu_features.h"

namespace optkit {
namespace {

struct Row {
    const char* name;
    Isa base;
    bool measured;
    bool (*present)();
};

constexpr Row ROWS[] = {
#define ISA(name, base, measured) {#name, Isa::base, measured, cpu::name},
#include "isas.h"
#undef ISA
};
constexpr int COUNT = sizeof ROWS / sizeof ROWS[0];

Isa best() {
    int last = COUNT - 1;
    while (!ROWS[last].present()) --last;
    return static_cast<Isa>(last);
}

std::atomic<Isa> current{best()};

}  // namespace

Isa isa() { return current.load(std::memory_order_relaxed); }

Isa base_isa() { return ROWS[static_cast<int>(isa())].base; }

}  // namespace optkit

// The instruction set in use, as a number of `Isa`.
OPTKIT_API int optkit_isa() { return static_cast<int>(optkit::isa()); }

// The name of an instruction set, null past the last.
OPTKIT_API const char* optkit_isa_name(int number) {
    return number >= 0 && number < optkit::COUNT ? optkit::ROWS[number].name : nullptr;
}

// 1 where kernels were measured on a CPU with the instruction set, 0 where they only ran emulated.
OPTKIT_API int optkit_isa_measured(int number) {
    return number >= 0 && number < optkit::COUNT && optkit::ROWS[number].measured;
}

// Use `wanted` from now on, or the best for -1. Gives 0, or 1 where this CPU does not have it.
OPTKIT_API int optkit_set_isa(int wanted) {
    const auto isa = wanted < 0 ? optkit::best() : static_cast<optkit::Isa>(wanted);
    if (static_cast<int>(isa) >= optkit::COUNT || !optkit::ROWS[static_cast<int>(isa)].present()) return 1;
    optkit::current.store(isa, std::memory_order_relaxed);
    return 0;
}
