// Runs functions of signatures.h for a process on another CPU (tests/support/arm.py): one request after another on
// standard input, until it ends. Numbers are int64, little-endian.
//   request  number of arrays; of each: bytes, contents
//            bytes of the function's name, name
//            number of arguments; of each: number of the array or -1; offset in the array, a number, or the bits of a float
//   answer   the result (0 of void); of a text its bytes or -1 of null, then the text
//            the contents of all arrays
// Around each array lie guard bytes: a call that writes there ends the process.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "dispatch.h"

namespace {

constexpr int64_t GUARD = 256;  // a multiple of the alignment
constexpr unsigned char GUARD_BYTE = 0xa5;

[[noreturn]] void fail(const std::string& what) {
    std::fprintf(stderr, "arm_calls: %s\n", what.c_str());
    std::exit(1);
}

void read(void* to, int64_t bytes) {
    if (std::fread(to, 1, bytes, stdin) != static_cast<std::size_t>(bytes)) fail("the request ends early");
}

int64_t read_number() {
    int64_t value;
    read(&value, sizeof value);
    return value;
}

void write(const void* from, int64_t bytes) {
    if (std::fwrite(from, 1, bytes, stdout) != static_cast<std::size_t>(bytes)) fail("the answer can't be written");
}

void write_number(int64_t value) { write(&value, sizeof value); }

void write_result(int64_t value) { write_number(value); }

void write_result(const char* text) {
    write_number(text ? static_cast<int64_t>(std::strlen(text)) : -1);
    if (text) write(text, std::strlen(text));
}

class Array {
public:
    explicit Array(int64_t bytes) : bytes_(bytes) {
        const int64_t all = (bytes + 2 * GUARD + 63) / 64 * 64;
        memory_ = static_cast<unsigned char*>(std::aligned_alloc(64, all));
        if (!memory_) fail("no memory");
        std::memset(memory_, GUARD_BYTE, all);
    }
    Array(const Array&) = delete;
    Array(Array&& other) : memory_(std::exchange(other.memory_, nullptr)), bytes_(other.bytes_) {}
    ~Array() { std::free(memory_); }
    unsigned char* data() const { return memory_ + GUARD; }
    int64_t bytes() const { return bytes_; }
    void check(const std::string& call) const {
        for (int64_t i = 0; i < GUARD; ++i)
            if (memory_[i] != GUARD_BYTE || data()[bytes_ + i] != GUARD_BYTE) fail(call + " wrote outside of an array");
    }

private:
    unsigned char* memory_;
    int64_t bytes_;
};

template <class T>
T as(int64_t value) {
    if constexpr (std::is_pointer_v<T>) {
        return reinterpret_cast<T>(value);
    } else if constexpr (std::is_floating_point_v<T>) {
        T number;
        std::memcpy(&number, &value, sizeof number);
        return number;
    } else {
        return static_cast<T>(value);
    }
}

template <class Result, class... Parameters, std::size_t... I>
void apply(Result (*function)(Parameters...), const std::vector<int64_t>& values, std::index_sequence<I...>) {
    if (values.size() != sizeof...(Parameters)) fail("a call has another number of arguments");
    if constexpr (std::is_void_v<Result>)
        function(as<Parameters>(values[I])...), write_number(0);
    else
        write_result(function(as<Parameters>(values[I])...));
}

template <class Result, class... Parameters>
void run(Result (*function)(Parameters...), const std::vector<int64_t>& values) {
    apply(function, values, std::index_sequence_for<Parameters...>());
}

void call(const std::string& name, const std::vector<int64_t>& values) {
#define FUNCTION(result, function, ...) \
    if (name == #function) return run(optkit_##function, values);
#define KERNEL FUNCTION
#include "signatures.h"
#undef FUNCTION
#undef KERNEL
    fail("no function is called " + name);
}

void answer(int64_t count) {
    std::vector<Array> arrays;
    for (; count > 0; --count) {
        arrays.emplace_back(read_number());
        read(arrays.back().data(), arrays.back().bytes());
    }
    std::string name(read_number(), ' ');
    read(&name[0], name.size());
    std::vector<int64_t> values(read_number());
    for (int64_t& value : values) {
        const int64_t array = read_number();
        value = read_number();
        if (array >= 0) value += reinterpret_cast<int64_t>(arrays.at(array).data());
    }
    call(name, values);
    for (const Array& array : arrays) {
        array.check(name);
        write(array.data(), array.bytes());
    }
    std::fflush(stdout);
}

}  // namespace

int main() {
    for (int64_t count; std::fread(&count, 1, sizeof count, stdin) == sizeof count;) answer(count);
}
