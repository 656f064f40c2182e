// Working memory of a thread that only grows: make it `thread_local`, and no call after the first of its size allocates.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace optkit {

class Scratch {
public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { std::free(memory_); }

    // At least `bytes` bytes on a cache line of their own. What was there before is lost when it grows.
    void* at_least(int64_t bytes) {
        if (bytes > size_) {
            std::free(memory_);
            size_ = (bytes + LINE - 1) / LINE * LINE;
            memory_ = std::aligned_alloc(LINE, size_);
            if (!memory_) throw std::bad_alloc();
        }
        return memory_;
    }

private:
    static constexpr int64_t LINE = 64;
    void* memory_ = nullptr;
    int64_t size_ = 0;
};

}  // namespace optkit
