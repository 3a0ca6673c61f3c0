// Tiling of gather_selection. Pure C++.
#pragma once

#include "../../common/tiling.h"
#include "../op_kernel/gather_selection_tiling_data.h"

namespace kvoffload::ascendc {

struct GatherShape {
  int64_t requests;
  int64_t tokens;
  int64_t width;
  int64_t queries;
  int64_t rows_kept;
  int64_t status_pitch;
  int64_t host_blocks;
  int64_t block_size;
  int64_t table_width;
  int64_t row_bytes[kComponents];
};

inline Tiled<GatherTiling> tile_gather_selection(const GatherShape& shape, int64_t cores) {
  Tiled<GatherTiling> tiled;
  GatherTiling& data = tiled.data;
  Checker check(tiled.refusal);
  check.between("cores", cores, 1, kMaxCores);
  check.between("requests", shape.requests, 0, kInt32Max);
  check.between("tokens", shape.tokens, 1, kInt32Max);
  check.between("top-k width", shape.width, 1, 8192);
  check.between("queries per row", shape.queries, 1, 8);
  check.between("status pitch", shape.status_pitch, shape.width + 1, kInt32Max);
  check.multiple("status pitch (allocate [R, Q, pitch] and view its first K + 1 columns)", shape.status_pitch, 16);
  check_pool(check, shape.rows_kept * shape.queries, shape.width);
  check_pool(check, shape.tokens, shape.width);
  tile_host(check, shape.host_blocks, shape.block_size, shape.table_width, data.host);
  if (!tiled.ok()) return tiled;
  data.table_bits = log2_of(2 * shape.width) < 5 ? 5 : log2_of(2 * shape.width);
  // Rows, lengths and starts of all requests, lengths of all selections, one block table, top-k, old and new status,
  // wanted ids and their old places, the hash table, the mover's lists, the report and the one-int buffer.
  const int64_t reserved = 2 * ub_ints(shape.requests) + ub_ints(shape.requests + 1) + 8 * ub_ints(shape.tokens) +
                           ub_ints(shape.table_width) + 5 * ub_ints(shape.width + 1) + (int64_t{2} << data.table_bits) +
                           3 * ub_ints(kListEntries) + kLineBytes + kUbBlockBytes;
  tile_rows(check, shape.row_bytes[0], shape.row_bytes[1], reserved, false, data.rows);
  for (const int64_t bytes : shape.row_bytes) {
    check.require(shape.width * bytes % kLineBytes == 0, "selection: " + std::to_string(shape.width) + " rows of " +
                                                             std::to_string(bytes) + " bytes must end with a line of " +
                                                             std::to_string(kLineBytes) + " bytes");
  }
  data.cores = static_cast<int32_t>(cores);
  data.requests = static_cast<int32_t>(shape.requests);
  data.tokens = static_cast<int32_t>(shape.tokens);
  data.width = static_cast<int32_t>(shape.width);
  data.queries = static_cast<int32_t>(shape.queries);
  data.rows_kept = static_cast<int32_t>(shape.rows_kept);
  data.status_pitch = static_cast<int32_t>(shape.status_pitch);
  return tiled;
}

}  // namespace kvoffload::ascendc
