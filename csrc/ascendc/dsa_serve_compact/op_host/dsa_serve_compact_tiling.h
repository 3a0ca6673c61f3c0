// Tiling of dsa_serve_compact. Pure C++.
#pragma once

#include "../../common/tiling.h"
#include "../op_kernel/dsa_serve_compact_tiling_data.h"

namespace kvoffload::ascendc {

struct ServeCompactShape {
  int64_t requests;
  int64_t tokens;
  int64_t width;
  int64_t hot_rows;
  int64_t slots;
  int64_t host_blocks;
  int64_t block_size;
  int64_t table_width;
  int64_t row_bytes[kComponents];
};

inline Tiled<ServeCompactTiling> tile_dsa_serve_compact(const ServeCompactShape& shape, int64_t cores) {
  Tiled<ServeCompactTiling> tiled;
  ServeCompactTiling& data = tiled.data;
  Checker check(tiled.refusal);
  check.between("cores", cores, 1, kMaxCores);
  check.between("requests", shape.requests, 0, kInt32Max);
  check.between("top-k width", shape.width, 1, kInt32Max);
  check.between("tokens", shape.tokens, 1, kInt32Max);
  check_pool(check, shape.tokens, shape.width);  // selection rows are numbered like pool rows
  check_pool(check, shape.hot_rows, shape.slots);
  tile_host(check, shape.host_blocks, shape.block_size, shape.table_width, data.host);
  // Rows, lengths and starts of all requests, one block table, a window of kinds, the mover's lists, the report.
  const int64_t reserved = 2 * ub_ints(shape.requests) + ub_ints(shape.requests + 1) + ub_ints(shape.table_width) +
                           5 * ub_ints(kListEntries) + kLineBytes;
  tile_rows(check, shape.row_bytes[0], shape.row_bytes[1], reserved, true, data.rows);
  if (!tiled.ok()) return tiled;
  data.cores = static_cast<int32_t>(cores);
  data.requests = static_cast<int32_t>(shape.requests);
  data.tokens = static_cast<int32_t>(shape.tokens);
  data.width = static_cast<int32_t>(shape.width);
  data.hot_rows = static_cast<int32_t>(shape.hot_rows);
  data.slots = static_cast<int32_t>(shape.slots);
  data.group = rows_per_line_group(data.rows);
  return tiled;
}

}  // namespace kvoffload::ascendc
