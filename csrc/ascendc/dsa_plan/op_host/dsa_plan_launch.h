// Launches dsa_plan on a stream. Addresses are the device's; see op_kernel/plan_values.h for shapes.
#pragma once

#include <cstdint>

#include "../op_kernel/dsa_plan_tiling_data.h"

namespace kvoffload::ascendc {

struct PlanPointers {
  uint8_t* topk;
  uint8_t* query_start_loc;
  uint8_t* seq_lens;
  uint8_t* rows;
  uint8_t* tags;
  uint8_t* ages;
  uint8_t* hands;
  uint8_t* high;
  uint8_t* slots;
  uint8_t* new_slots;
  uint8_t* miss_ids;
  uint8_t* miss_slots;
  uint8_t* miss_counts;
  uint8_t* stats;
  uint8_t* kinds;
  uint8_t* miss_positions;
  uint8_t* workspace;
};

// Returns at once; the tiling is copied into the launch.
void launch_dsa_plan(void* stream, const PlanTiling& tiling, const PlanPointers& pointers);

}  // namespace kvoffload::ascendc
