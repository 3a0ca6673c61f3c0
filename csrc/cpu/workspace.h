// Scratch of one planning thread. Every call leaves it as it found it (all zero / all -1 where that matters), so a
// call pays for its ids (up to 16 bytes of a pass over the partition for each) and never for the size of the pool.
#pragma once

#include <cstdint>
#include <vector>

namespace kvoffload {

// Raw view handed to the kernels, which must not instantiate library code (see plan_kernel.h).
struct Scratch {
  std::uint8_t* needed;         // [slots], not 0: this step uses the slot; all 0 between requests. [-1] may be written
  std::int32_t* pending;        // [ids + 16], positions whose id is not resident; a block at a time is stored
  std::int32_t* displaced_id;   // [displaced_size], open addressing, -1: free; all -1 between requests
  std::int32_t* displaced_slot; // [displaced_size]
  std::int32_t* displaced_used; // [ids], entries to free again
  int displaced_bits;           // displaced_size = 1 << displaced_bits, at least twice the ids
};

class Workspace {
 public:
  // Grows, never shrinks. `ids`: most top-k positions of one request.
  void reserve(std::int64_t slots, std::int64_t ids, std::int64_t partitions);
  Scratch scratch();
  std::vector<std::uint8_t>& partition_seen() { return partition_seen_; }

 private:
  std::vector<std::uint8_t> needed_;
  std::vector<std::int32_t> pending_, displaced_id_, displaced_slot_, displaced_used_;
  std::vector<std::uint8_t> partition_seen_;  // [partitions], all zero between calls
  int displaced_bits_ = 0;
};

}  // namespace kvoffload
