// Working memory of a thread: declared `thread_local`, the memory only grows, so repeated calls do not allocate.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace optkit {

class GrowingMemory {
public:
    GrowingMemory() = default;
    GrowingMemory(const GrowingMemory&) = delete;
    GrowingMemory& operator=(const GrowingMemory&) = delete;
    ~GrowingMemory() { std::free(memory_); }

    // At least `count` of T on a cache line of their own. What was there before is lost when it grows.
    template <class T>
    T* at_least(int64_t count) {
        const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
        if (bytes > size_) {
            std::free(memory_);
            memory_ = nullptr;
            size_ = (bytes + LINE - 1) / LINE * LINE;
            memory_ = std::aligned_alloc(LINE, size_);
            if (!memory_) throw std::bad_alloc();
        }
        show_sanitizer(bytes);
        return static_cast<T*>(memory_);
    }

private:
    static constexpr int64_t LINE = 64;

    // What lies past the `bytes` that were asked for is no memory for AddressSanitizer.
    void show_sanitizer(int64_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
        ASAN_UNPOISON_MEMORY_REGION(memory_, bytes);
        ASAN_POISON_MEMORY_REGION(static_cast<char*>(memory_) + bytes, size_ - bytes);
#else
        static_cast<void>(bytes);
#endif
    }

    void* memory_ = nullptr;
    int64_t size_ = 0;
};

}  // namespace optkit
