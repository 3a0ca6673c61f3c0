#pragma once

#include "../../common/tiling_data.h"

namespace kvoffload::ascendc {

struct HostWriteTiling {
  int32_t cores;
  int32_t tokens;     // T
  int32_t host_rows;  // of a layer
  int32_t group;      // neighbouring host rows that one core writes; more than 1 where rows share lines
  RowsTiling rows;
};

}  // namespace kvoffload::ascendc
