// Launches dsa_install on a stream. Addresses are the device's; see op_kernel/dsa_install.cpp for shapes.
#pragma once

#include <cstdint>

#include "../op_kernel/dsa_install_tiling_data.h"

namespace kvoffload::ascendc {

struct InstallPointers {
  uint8_t* selection[kComponents];
  uint8_t* hot[kComponents];
  uint8_t* query_start_loc;
  uint8_t* rows;
  uint8_t* miss_positions;
  uint8_t* miss_slots;
  uint8_t* miss_counts;
  uint8_t* reports;
};

// Returns at once; the tiling is copied into the launch.
void launch_dsa_install(void* stream, const InstallTiling& tiling, const InstallPointers& pointers);

}  // namespace kvoffload::ascendc
