#pragma once

#include "../../common/tiling_data.h"

namespace kvoffload::ascendc {

struct GatherTiling {
  int32_t cores;
  int32_t requests;      // N
  int32_t tokens;        // T
  int32_t width;         // K
  int32_t queries;       // Q, selections kept per row
  int32_t rows_kept;     // R
  int32_t status_pitch;  // int32 from one selection's status to the next
  int32_t table_bits;    // log2 of the hash table's entries
  HostTiling host;
  RowsTiling rows;
};

}  // namespace kvoffload::ascendc
