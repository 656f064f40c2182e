// The tests of the CPU at hand, one for each row of isas.h: true where the CPU and the system run its instructions.
#pragma once

namespace optkit::cpu {

#define ISA(name, base, measured) bool name();
#include "isas.h"
#undef ISA

}  // namespace optkit::cpu
