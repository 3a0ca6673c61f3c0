// A minimal test harness: each TEST runs on its own; a failed CHECK fails the program.
#pragma once

#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "acpu.h"
#include "kernel_operator.h"

namespace testing {

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline int& failures() {
  static int count = 0;
  return count;
}

inline bool add(const char* name, void (*body)()) {
  tests().push_back({name, body});
  return true;
}

inline void fail(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  ++failures();
}

#define TEST(name)                                             \
  static void name();                                          \
  static const bool name##_added = ::testing::add(#name, name); \
  static void name()
#define CHECK(condition) \
  do {                   \
    if (!(condition)) ::testing::fail(__FILE__, __LINE__, #condition); \
  } while (false)

inline constexpr acpu::Schedule kSchedules[] = {acpu::Schedule::kEager, acpu::Schedule::kLazy,
                                                acpu::Schedule::kLazyReverse};

// Global memory of a test: aligned as the device's is.
template <typename T>
struct Gm {
  explicit Gm(size_t n, T value = T()) : raw(n * sizeof(T) + 64), size(n) {
    void* at = raw.data();
    size_t space = raw.size();
    data = static_cast<T*>(std::align(64, n * sizeof(T), at, space));
    for (size_t i = 0; i < n; ++i) data[i] = value;
  }
  Gm(const Gm&) = delete;
  T& operator[](size_t i) { return data[i]; }
  size_t bytes() const { return size * sizeof(T); }
  AscendC::GlobalTensor<T> tensor() const {
    AscendC::GlobalTensor<T> result;
    result.SetGlobalBuffer(data, size);
    return result;
  }

  std::vector<uint8_t> raw;
  T* data;
  size_t size;
};

inline acpu::Options with(acpu::Schedule schedule, int cores = 1) {
  acpu::Options options;
  options.schedule = schedule;
  options.cores = cores;
  return options;
}

// A kernel that needs no global memory.
inline acpu::Result run(const std::function<void()>& kernel, acpu::Options options = {}) {
  return acpu::Launch(options).run(kernel);
}

#define CHECK_CLEAN(result)                                                            \
  do {                                                                                 \
    const acpu::Result& r_ = (result);                                                 \
    if (!r_.clean() || !r_.completed) ::testing::fail(__FILE__, __LINE__, "reports:\n" + r_.text()); \
  } while (false)

// Exactly the reports of one kind, at least one.
#define CHECK_ONLY(result, expected)                                                                      \
  do {                                                                                                    \
    const acpu::Result& r_ = (result);                                                                    \
    bool only_ = !r_.clean();                                                                             \
    for (const acpu::Report& report_ : r_.reports) only_ &= report_.kind == acpu::Kind::expected;         \
    if (!only_) ::testing::fail(__FILE__, __LINE__, "not only " #expected ":\n" + r_.text());             \
  } while (false)

#define CHECK_HAS(result, expected)                                                                       \
  do {                                                                                                    \
    const acpu::Result& r_ = (result);                                                                    \
    if (!r_.has(acpu::Kind::expected)) ::testing::fail(__FILE__, __LINE__, "no " #expected ":\n" + r_.text()); \
  } while (false)

}  // namespace testing
