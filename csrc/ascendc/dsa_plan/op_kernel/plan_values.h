// Values passed from the cores that plan a partition's parts to the one that puts them together: for each position one
// int32, `how << 24 | (slot + 1)`. Parts have disjoint positions and 0 elsewhere, so that their sum is the partition's.
#pragma once

#include "dsa_plan_tiling_data.h"
#include "kernel_operator.h"

namespace kvoffload::ascendc {

constexpr int32_t kHowBits = 24;
constexpr int32_t kHowHit = 1;
constexpr int32_t kHowMiss = 2;           // first occurrence, placed in its own set
constexpr int32_t kHowNew = 3;            // the same of a token of this step
constexpr int32_t kHowDuplicate = 4;      // placed at an earlier position
constexpr int32_t kHowOverflow = 5;       // its set is full; slot + 1 is 0
constexpr int32_t kHowDisplacedMiss = 6;  // first occurrence, placed in another set
constexpr int32_t kHowDisplacedNew = 7;

__aicore__ inline int32_t plan_value(int32_t how, int32_t slot) { return (how << kHowBits) | (slot + 1); }

// Counts of a part (kRecordInts int32); the slots + 1 of new tokens follow from kRecordNewSlots on.
constexpr int32_t kRecordHitPositions = 0;
constexpr int32_t kRecordHits = 1;
constexpr int32_t kRecordMisses = 2;
constexpr int32_t kRecordNew = 3;
constexpr int32_t kRecordDuplicates = 4;
constexpr int32_t kRecordOverflow = 5;

// Totals of a request: PlanOut.stats' six in their order, of which the misses are the miss count; then the new slots.
constexpr int32_t kTotalHits = 0;
constexpr int32_t kTotalMisses = 1;
constexpr int32_t kTotalNew = 2;
constexpr int32_t kTotalDisplaced = 3;
constexpr int32_t kTotalDuplicates = 4;
constexpr int32_t kTotalInvalid = 5;
constexpr int32_t kTotalCount = 6;
constexpr int32_t kTotalLength = 6;  // the request's tokens; -1: it has no plan, and zeros above
constexpr int32_t kTotalRow = 7;     // its partition

struct PlanArguments {
  GM_ADDR topk;             // int32 [T, K]
  GM_ADDR query_start_loc;  // int32 [N + 1]
  GM_ADDR seq_lens;         // int32 [N]
  GM_ADDR rows;             // int32 [N]
  GM_ADDR tags;             // int32 [R, S, W], updated
  GM_ADDR ages;             // uint8 [R, S, W], updated
  GM_ADDR hands;            // uint8 [R, S], updated
  GM_ADDR high;             // int32 [R], updated
  GM_ADDR slots;            // int32 [T, K], written
  GM_ADDR new_slots;        // int32 [T], written
  GM_ADDR miss_ids;         // int32 [N, M], written
  GM_ADDR miss_slots;       // int32 [N, M], written
  GM_ADDR miss_counts;      // int32 [N], written
  GM_ADDR stats;            // int64 [6], written
  GM_ADDR kinds;            // int32 [T, K, 2], written when compact
  GM_ADDR miss_positions;   // int32 [N, M], written when compact
  GM_ADDR workspace;        // see PlanTiling
};

}  // namespace kvoffload::ascendc
