#pragma once

#include "../../common/tiling_data.h"

namespace kvoffload::ascendc {

struct ServeTiling {
  int32_t cores;
  int32_t requests;       // N
  int32_t tokens;         // T
  int32_t hot_rows;       // R
  int32_t slots;          // P, per partition
  int32_t miss_capacity;  // M
  int32_t by_request;     // 1: rows share lines, so that a request's rows are written by one core only
  HostTiling host;
  RowsTiling rows;
};

}  // namespace kvoffload::ascendc
