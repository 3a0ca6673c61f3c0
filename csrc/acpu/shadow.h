// Last accesses of each byte: the shadow of the unified buffer and of global memory.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "clock.h"
#include "sites.h"

namespace acpu {

inline constexpr uint32_t kBlockBytes = 32;      // unified-buffer block
inline constexpr uint32_t kLineBytes = 64;       // cache line of global memory
inline constexpr uint8_t kPoison = 0xCB;         // bytes nothing wrote

// `count` bits from bit `first`.
inline constexpr uint64_t bit_range(uint32_t first, uint32_t count) {
  return (count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1) << first;
}

// The instruction that touches memory.
struct Toucher {
  int core;
  Pipe pipe;
  uint32_t instruction;  // its number on that pipe of that core, from 1
  uint32_t epoch;        // SyncAll calls before it
  SiteId site;
};

struct Record {
  uint64_t bytes;  // bit per byte of the block or line
  uint32_t instruction;
  uint32_t epoch;
  SiteId site;
  uint8_t core;
  Pipe pipe;
  bool write;
};

// The accesses to one block or line that later accesses must still be ordered after.
class History {
 public:
  // Calls conflict(record) for each earlier access of the same core that `clock` doesn't order before this one, and
  // foreign(record, overlap) for each write/write or overlapping conflict with another core of the same epoch.
  template <class Conflict, class Foreign>
  void touch(const Toucher& by, uint64_t bytes, bool write, const Clock& clock, Conflict conflict, Foreign foreign) {
    size_t kept = 0;
    for (size_t i = 0; i < records_.size(); ++i) {
      Record record = records_[i];
      if (record.epoch < by.epoch) continue;  // SyncAll waits for everything, so nothing can conflict with it any more
      const uint64_t overlap = record.bytes & bytes;
      const bool own = record.core == by.core;
      if (own && overlap && (write || record.write) && !clock.covers(record.pipe, record.instruction) &&
          !(record.pipe == by.pipe && record.instruction == by.instruction)) {
        conflict(record);
      }
      if (!own && (write || record.write) && (overlap || (write && record.write))) foreign(record, overlap);
      // An access ordered after this one is also ordered after the access that this one supersedes.
      if (own && (write || (!record.write && record.pipe == by.pipe))) record.bytes &= ~bytes;
      if (record.bytes) records_[kept++] = record;
    }
    records_.resize(kept);
    records_.push_back({bytes, by.instruction, by.epoch, by.site, static_cast<uint8_t>(by.core), by.pipe, write});
  }

  void clear() { records_.clear(); }

 private:
  std::vector<Record> records_;
};

}  // namespace acpu
