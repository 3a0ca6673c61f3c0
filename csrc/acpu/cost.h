// Estimates how many cycles a kernel takes: the times of a core's pipes, moved on by each instruction and by flags.
//
// A model of orders of magnitude, for comparing two versions of a kernel: scalar arithmetic and control flow are free,
// memory has no contention, and no figure was measured on a device. See docs/acpu.md.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "clock.h"

namespace acpu {

struct CostModel {
  uint64_t scalar_read = 12;      // of the unified buffer
  uint64_t scalar_write = 2;
  uint64_t global_scalar = 300;   // a scalar access to global memory
  uint64_t issue = 2;             // of an instruction to another pipe
  uint64_t vector = 20;           // an instruction's fixed part
  uint64_t vector_bytes = 256;    // and what it does in one cycle more
  uint64_t gather = 8;            // cycles of a gather for each vector_bytes
  uint64_t copy_latency = 1850;   // 1 us
  uint64_t copy = 50;             // an instruction's fixed part, after which the next can start
  uint64_t copy_bytes = 21;       // a cycle: 40 GB/s
  uint64_t flag = 40;
  uint64_t sync_all = 400;
};
inline constexpr CostModel kCosts;

// Work of a kernel on all its cores.
struct Work {
  uint64_t scalar_reads = 0;
  uint64_t scalar_writes = 0;
  uint64_t vectors = 0;
  uint64_t copies = 0;
  uint64_t copied_bytes = 0;
  uint64_t flags = 0;

  void add(const Work& other) {
    scalar_reads += other.scalar_reads;
    scalar_writes += other.scalar_writes;
    vectors += other.vectors;
    copies += other.copies;
    copied_bytes += other.copied_bytes;
    flags += other.flags;
  }
};

class PipeTimes {
 public:
  Work work;

  void scalar(bool write) {
    ++(write ? work.scalar_writes : work.scalar_reads);
    next(Pipe::kS) += write ? kCosts.scalar_write : kCosts.scalar_read;
  }
  void global_scalar() { next(Pipe::kS) += kCosts.global_scalar; }

  void vector(uint64_t bytes, bool gather) {
    ++work.vectors;
    const uint64_t steps = (bytes + kCosts.vector_bytes - 1) / kCosts.vector_bytes;
    run(Pipe::kV, kCosts.vector + steps * (gather ? kCosts.gather : 1), 0);
  }
  void copy(Pipe pipe, uint64_t bytes) {
    ++work.copies;
    work.copied_bytes += bytes;
    run(pipe, kCosts.copy + bytes / kCosts.copy_bytes, kCosts.copy_latency);
  }

  // The time that a flag set now carries.
  uint64_t flag_time(Pipe from) {
    ++work.flags;
    next(Pipe::kS) += kCosts.issue;
    return from == Pipe::kS ? next(Pipe::kS) : end_[index_of(from)];
  }
  void wait(Pipe to, uint64_t flag_time) { next(to) = std::max(next(to), flag_time) + kCosts.flag; }

  // The scalar unit reads a result of the pipe.
  void settle(Pipe pipe) { next(Pipe::kS) = std::max(next(Pipe::kS), end_[index_of(pipe)]) + kCosts.scalar_read; }

  uint64_t end() const { return std::max(*std::max_element(next_.begin(), next_.end()),
                                         *std::max_element(end_.begin(), end_.end())); }
  void all_at(uint64_t time) {
    next_.fill(time);
    end_.fill(time);
  }

 private:
  uint64_t& next(Pipe pipe) { return next_[index_of(pipe)]; }

  void run(Pipe pipe, uint64_t cycles, uint64_t latency) {
    next(Pipe::kS) += kCosts.issue;
    const uint64_t start = std::max(next(pipe), next(Pipe::kS));
    next(pipe) = start + cycles;
    end_[index_of(pipe)] = next(pipe) + latency;
  }

  std::array<uint64_t, kPipes> next_{};  // when the pipe can start its next instruction
  std::array<uint64_t, kPipes> end_{};   // when all its instructions are complete
};

struct Cost {
  std::vector<uint64_t> phases;  // cycles of the slowest core between two SyncAll calls
  Work work;
};

}  // namespace acpu
