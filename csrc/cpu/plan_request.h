// Inputs of one request's plan, resolved to its partition: the interface between plan.cpp and the kernels of each ISA.
#pragma once

#include "residency.h"
#include "workspace.h"

namespace kvoffload {

// Maximum slots per id at which one pass over a partition is cheaper than visiting each id's own set.
inline constexpr std::int64_t kDense = 16;

// The partition of the request planned next, prefetched in the meantime.
struct NextPartitionView {
  const std::int32_t* tags;
  const std::uint8_t* ages;
  std::int64_t slots;  // 0: none
};

struct RequestJob {
  const std::int32_t* topk;  // [query_tokens, width]
  std::int32_t* slots;       // [query_tokens, width]
  std::int32_t* new_slots;   // [query_tokens]
  std::int32_t* miss_ids;    // [query_tokens * width] at least
  std::int32_t* miss_slots;
  std::int32_t* miss_count;
  std::int32_t* kinds;           // [query_tokens, width, 2], or null
  std::int32_t* miss_positions;  // as miss_ids, or null
  std::int32_t* tags;   // [sets, ways] of the request's partition
  std::uint8_t* ages;   // [sets, ways]
  std::uint8_t* hands;  // [sets]
  std::int32_t* high;
  std::int32_t query_tokens;
  std::int32_t width;
  std::int32_t seq_len;
  std::int32_t sets;
  std::int32_t expected_misses;  // a guess, for pacing only
  bool fetched;      // the previous request had this partition as its `next`
  NextPartitionView next;
};

using PlanRequestFn = void (*)(const RequestJob&, const Scratch&, PlanStats&);

// One getter per instruction set; ways, those of an id, is 16 or 32.
PlanRequestFn portable_planner(Policy policy, Placement placement, int ways);
PlanRequestFn avx2_planner(Policy policy, Placement placement, int ways);
PlanRequestFn avx512_planner(Policy policy, Placement placement, int ways);
PlanRequestFn neon_planner(Policy policy, Placement placement, int ways);

}  // namespace kvoffload
