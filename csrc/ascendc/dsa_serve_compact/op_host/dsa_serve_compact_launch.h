// Launches dsa_serve_compact on a stream. Addresses are the device's; see op_kernel/dsa_serve_compact.cpp for shapes.
#pragma once

#include <cstdint>

#include "../op_kernel/dsa_serve_compact_tiling_data.h"

namespace kvoffload::ascendc {

struct ServeCompactPointers {
  uint8_t* host[kComponents];
  uint8_t* hot[kComponents];
  uint8_t* new_rows[kComponents];
  uint8_t* selection[kComponents];
  uint8_t* kinds;
  uint8_t* query_start_loc;
  uint8_t* seq_lens;
  uint8_t* block_table;
  uint8_t* rows;
  uint8_t* reports;
};

// Returns at once; the tiling is copied into the launch.
void launch_dsa_serve_compact(void* stream, const ServeCompactTiling& tiling, const ServeCompactPointers& pointers);

}  // namespace kvoffload::ascendc
