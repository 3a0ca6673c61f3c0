// Tiling of host_write. Pure C++.
#pragma once

#include "../../common/tiling.h"
#include "../op_kernel/host_write_tiling_data.h"

namespace kvoffload::ascendc {

struct HostWriteShape {
  int64_t tokens;
  int64_t host_blocks;
  int64_t block_size;
  int64_t row_bytes[kComponents];
};

inline Tiled<HostWriteTiling> tile_host_write(const HostWriteShape& shape, int64_t cores) {
  Tiled<HostWriteTiling> tiled;
  HostWriteTiling& data = tiled.data;
  Checker check(tiled.refusal);
  check.between("cores", cores, 1, kMaxCores);
  check.between("tokens", shape.tokens, 0, kInt32Max);
  HostTiling host{};
  tile_host(check, shape.host_blocks, shape.block_size, 1, host);
  // A window of slots, the mover's lists, the report.
  tile_rows(check, shape.row_bytes[0], shape.row_bytes[1], 4 * ub_ints(kListEntries) + kLineBytes, false, data.rows);
  if (!tiled.ok()) return tiled;
  const int64_t host_rows = shape.host_blocks * shape.block_size;
  for (const int64_t bytes : shape.row_bytes) {
    check.require(host_rows * bytes % kLineBytes == 0, "host: " + std::to_string(host_rows) + " rows of " +
                                                           std::to_string(bytes) + " bytes must end with a line");
  }
  data.cores = static_cast<int32_t>(cores);
  data.tokens = static_cast<int32_t>(shape.tokens);
  data.host_rows = static_cast<int32_t>(host_rows);
  data.group = rows_per_line_group(data.rows);
  return tiled;
}

}  // namespace kvoffload::ascendc
