// Launches gather_selection on a stream. Addresses are the device's; see op_kernel/gather_selection.cpp for shapes.
#pragma once

#include <cstdint>

#include "../op_kernel/gather_selection_tiling_data.h"

namespace kvoffload::ascendc {

struct GatherPointers {
  uint8_t* host[kComponents];
  uint8_t* new_rows[kComponents];
  uint8_t* selection[kComponents];
  uint8_t* status;
  uint8_t* topk;
  uint8_t* query_start_loc;
  uint8_t* seq_lens;
  uint8_t* rows;
  uint8_t* block_table;
  uint8_t* lengths;
  uint8_t* reports;
};

// Returns at once; the tiling is copied into the launch.
void launch_gather_selection(void* stream, const GatherTiling& tiling, const GatherPointers& pointers);

}  // namespace kvoffload::ascendc
