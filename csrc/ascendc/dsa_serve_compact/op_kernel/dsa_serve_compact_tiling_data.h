#pragma once

#include "../../common/tiling_data.h"

namespace kvoffload::ascendc {

struct ServeCompactTiling {
  int32_t cores;
  int32_t requests;  // N
  int32_t tokens;    // T
  int32_t width;     // K
  int32_t hot_rows;  // R
  int32_t slots;     // P, per partition
  int32_t group;     // positions are dealt out in groups of this many, so that no two cores share a line
  HostTiling host;
  RowsTiling rows;
};

}  // namespace kvoffload::ascendc
