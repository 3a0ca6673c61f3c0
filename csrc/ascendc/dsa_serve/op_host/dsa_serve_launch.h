// Launches dsa_serve on a stream. Addresses are the device's; see op_kernel/dsa_serve.cpp for shapes.
#pragma once

#include <cstdint>

#include "../op_kernel/dsa_serve_tiling_data.h"

namespace kvoffload::ascendc {

struct ServePointers {
  uint8_t* host[kComponents];
  uint8_t* hot[kComponents];
  uint8_t* new_rows[kComponents];
  uint8_t* block_table;
  uint8_t* query_start_loc;
  uint8_t* rows;
  uint8_t* miss_ids;
  uint8_t* miss_slots;
  uint8_t* miss_counts;
  uint8_t* new_slots;
  uint8_t* reports;
};

// Returns at once; the tiling is copied into the launch.
void launch_dsa_serve(void* stream, const ServeTiling& tiling, const ServePointers& pointers);

}  // namespace kvoffload::ascendc
