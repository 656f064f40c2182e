// A program: kernel calls in order, run by one C call for a whole step.
//
// A step of a small model is hundreds of kernel calls of microseconds each; calls from Python would double the time. A
// program is made once by kernels/ops/cpu/program.py and holds, for each call, the kernel and the source of each
// argument. Three things change between steps: the sizes of the batch (`sizes`), the tensors of the batch (`inputs`) and
// the addresses of the working memory (`arenas`, one for each kind of row).
//
// Some calls compute each token from the same token of their inputs. A run of such calls, as between two attentions, takes
// a block of tokens through all its calls and then the next block. So what one call writes is still in the cache of the core
// that reads it, buffers that only the run uses have the size of a block, and threads meet once a run, not once a call.
#pragma once

#include <cstdint>

namespace optkit {

// Where an argument comes from; the order is the Python side's too.
enum class Source : int32_t {
    constant = 0,  // `value` itself: a number, the bits of a float, or the address of a weight
    size = 1,      // sizes[index] * value
    input = 2,     // inputs[index] + offset
    arena = 3,     // arenas[index] + sizes[index] * value + offset: buffers are laid out per row
    block = 4,     // the same in the memory of a block of tokens
};

struct Argument {
    Source source;
    int32_t index;
    int64_t value;
    int64_t offset;     // bytes
    int64_t row_bytes;  // from a token to the next one, where the call can take some tokens at a time
};

struct Call {
    int32_t op;     // index among the KERNELs of signatures.h
    int32_t first;  // of its arguments
    int32_t run;    // calls of the run that starts here; 1 for a call on its own, 0 within a run
    int32_t unused;
};

}  // namespace optkit
