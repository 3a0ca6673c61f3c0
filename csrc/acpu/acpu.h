// The launcher of the CPU twin of an Ascend AI-vector core. See docs/acpu.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "report.h"

namespace acpu {

// When asynchronous instructions (V, MTE2, MTE3) take effect.
enum class Schedule : uint8_t {
  kEager,        // at issue; cores in order
  kLazy,         // as late as flags and barriers allow, consumers (MTE3, V) before producers; cores in reverse
  kLazyReverse,  // as late as they allow, producers (MTE2) before consumers; cores in order
};

enum class RegionUse : uint8_t {
  kIn,     // initialised, read only
  kInOut,  // initialised
  kOut,    // poisoned at launch; a read before a write is reported (outputs, workspace)
};

struct Options {
  int cores = 1;  // 1..64
  Schedule schedule = Schedule::kEager;
  uint32_t ub_bytes = 192 * 1024;  // Atlas A2/A3
  uint64_t tiling_key = 0;         // compared by TILING_KEY_IS
  std::set<std::string> drop;      // keys of synchronisation sites whose effect is dropped
  size_t fiber_stack_bytes = 1 << 20;
};

class Launch {
 public:
  explicit Launch(Options options) : options_(std::move(options)) {}

  // Registers global memory the kernel may touch. Throws std::invalid_argument if it is empty, doesn't start on 64
  // bytes, or overlaps another region.
  Launch& region(const void* data, size_t bytes, RegionUse use, std::string name);

  // Runs the kernel on every core and returns the findings. Throws std::invalid_argument on bad options only.
  Result run(const std::function<void()>& kernel);

 private:
  struct RegionSpec {
    uint8_t* data;
    size_t bytes;
    RegionUse use;
    std::string name;
  };

  Options options_;
  std::vector<RegionSpec> regions_;
};

}  // namespace acpu
