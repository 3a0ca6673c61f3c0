// Tiling of dsa_install. Pure C++.
#pragma once

#include "../../common/tiling.h"
#include "../op_kernel/dsa_install_tiling_data.h"

namespace kvoffload::ascendc {

struct InstallShape {
  int64_t requests;
  int64_t tokens;
  int64_t width;
  int64_t hot_rows;
  int64_t slots;
  int64_t miss_capacity;
  int64_t row_bytes[kComponents];
};

inline Tiled<InstallTiling> tile_dsa_install(const InstallShape& shape, int64_t cores) {
  Tiled<InstallTiling> tiled;
  InstallTiling& data = tiled.data;
  Checker check(tiled.refusal);
  check.between("cores", cores, 1, kMaxCores);
  check.between("requests", shape.requests, 0, kInt32Max);
  check.between("miss capacity", shape.miss_capacity, 1, kInt32Max);
  check_pool(check, shape.tokens, shape.width);
  check_pool(check, shape.hot_rows, shape.slots);
  // Rows, counts and starts of all requests, two windows of misses, the mover's lists, the report.
  const int64_t reserved =
      2 * ub_ints(shape.requests) + ub_ints(shape.requests + 1) + 5 * ub_ints(kListEntries) + kLineBytes;
  tile_rows(check, shape.row_bytes[0], shape.row_bytes[1], reserved, false, data.rows);
  data.by_request = needs_one_core(check, data.rows, shape.slots);
  if (!tiled.ok()) return tiled;
  data.cores = static_cast<int32_t>(cores);
  data.requests = static_cast<int32_t>(shape.requests);
  data.tokens = static_cast<int32_t>(shape.tokens);
  data.width = static_cast<int32_t>(shape.width);
  data.hot_rows = static_cast<int32_t>(shape.hot_rows);
  data.slots = static_cast<int32_t>(shape.slots);
  data.miss_capacity = static_cast<int32_t>(shape.miss_capacity);
  return tiled;
}

}  // namespace kvoffload::ascendc
