// Launches host_write on a stream. Addresses are the device's; see op_kernel/host_write.cpp for shapes.
#pragma once

#include <cstdint>

#include "../op_kernel/host_write_tiling_data.h"

namespace kvoffload::ascendc {

struct HostWritePointers {
  uint8_t* host[kComponents];
  uint8_t* new_rows[kComponents];
  uint8_t* slot_mapping;
  uint8_t* reports;
};

// Returns at once; the tiling is copied into the launch.
void launch_host_write(void* stream, const HostWriteTiling& tiling, const HostWritePointers& pointers);

}  // namespace kvoffload::ascendc
