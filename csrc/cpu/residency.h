// Views of the plan's state, input and output. Plain pointers and sizes: the core knows neither Python nor torch,
// so that it can be unit-tested, sanitised and embedded on its own. Shapes are row-major and contiguous.
#pragma once

#include <cstdint>

#include "../policies/placement.h"
#include "../policies/policies.h"

namespace kvoffload {

// Tokens in the slots of a partition. Slot number = set * set_ways + way of the set; an id lives in the sets that the
// placement says.
struct ResidencyView {
  std::int32_t* tags;   // [partitions, sets, set_ways], -1: empty
  std::uint8_t* ages;   // [partitions, sets, set_ways], the policy's bits of each slot
  std::uint8_t* hands;  // [partitions, sets]
  std::int32_t* high;   // [partitions], largest seq_len planned since the last roll-back, 0 after a reset
  std::int64_t partitions;
  std::int64_t sets;  // power of two
  int set_ways;       // of one set: 16 or 32, half of that with two sets
  Policy policy;
  Placement placement = Placement::kOneSet;

  std::int64_t slots() const { return sets * set_ways; }
  int ways() const { return placement == Placement::kTwoSets ? 2 * set_ways : set_ways; }  // of one id: 16 or 32
};

// Meaning of the number beside a position's kind; the values are part of the interface. See Kind in ops/types.py.
inline constexpr std::int32_t kInvalid = 0;       // -1
inline constexpr std::int32_t kPoolHit = 1;       // slot
inline constexpr std::int32_t kOldMiss = 2;       // id, in the host pool
inline constexpr std::int32_t kDecodeWindow = 3;  // id, a new token of the step
inline constexpr std::int32_t kFutureSkip = 4;    // id
inline constexpr std::int32_t kNegativeStop = 5;  // id

struct PlanInput {
  const std::int32_t* topk;             // [tokens, width]
  const std::int32_t* query_start_loc;  // [requests + 1]
  const std::int32_t* seq_lens;         // [requests]
  const std::int32_t* rows;             // [requests], negative: skip
  std::int64_t tokens;
  std::int64_t width;
  std::int64_t requests;
};

// Buffers may be longer than the step needs; only the step's part is written.
struct PlanOutput {
  std::int32_t* slots;        // [max_tokens, width]
  std::int32_t* new_slots;    // [max_tokens]
  std::int32_t* miss_ids;     // [max_requests, miss_capacity]
  std::int32_t* miss_slots;   // [max_requests, miss_capacity]
  std::int32_t* miss_counts;  // [max_requests]
  std::int64_t* stats;        // [6], see PlanStats
  std::int64_t max_tokens;
  std::int64_t max_requests;
  std::int64_t miss_capacity;
  std::int64_t width;
  std::int32_t* kinds;           // [max_tokens, width, 2], or null: no compact delivery
  std::int32_t* miss_positions;  // [max_requests, miss_capacity], or null
};

// Order of the stats vector.
struct PlanStats {
  std::int64_t hits = 0;
  std::int64_t misses = 0;
  std::int64_t new_tokens = 0;
  std::int64_t displaced = 0;
  std::int64_t duplicates = 0;
  std::int64_t invalid = 0;
};

inline constexpr int kStatsCount = 6;

}  // namespace kvoffload
