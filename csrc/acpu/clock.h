// Pipes of an AI-vector core and the vector clock that orders their instructions.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace acpu {

enum class Pipe : uint8_t { kS, kV, kMte2, kMte3 };
inline constexpr int kPipes = 4;
inline constexpr int index_of(Pipe pipe) { return static_cast<int>(pipe); }
const char* pipe_name(Pipe pipe);

// Per pipe, how many of its instructions are known to be complete.
struct Clock {
  std::array<uint32_t, kPipes> done{};

  void join(const Clock& other) {
    for (int p = 0; p < kPipes; ++p) done[p] = std::max(done[p], other.done[p]);
  }
  bool covers(Pipe pipe, uint32_t instruction) const { return done[index_of(pipe)] >= instruction; }
};

}  // namespace acpu
