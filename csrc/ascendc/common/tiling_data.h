// Limits and tiling fields that host and kernels share: plain data, no functions, nothing but fixed-width integers.
#pragma once

#include <cstdint>

namespace kvoffload::ascendc {

constexpr int32_t kLineBytes = 64;          // unit that two cores must not both write
constexpr int32_t kUbBlockBytes = 32;       // alignment of the unified buffer
constexpr int32_t kComponents = 2;          // a row's parts, e.g. nope and rope
constexpr int32_t kListEntries = 512;       // rows that a kernel prepares at a time
constexpr int32_t kReportInts = 8;          // int64 of one core's report: bytes fetched, rows refused, unused

// Staging of rows: two buffers of `batch_rows` rows, one being filled while the other is emptied. Each component has
// its own part of a buffer.
struct RowsTiling {
  int32_t bytes[kComponents];  // of one row; 0: no such component
  int32_t pitch[kComponents];  // of one row in the unified buffer
  int32_t batch_rows;
  int32_t buffer_bytes;
};

// Paged rows in host memory: token i of a request is row `table[i / block_size] * block_size + i % block_size`.
struct HostTiling {
  int32_t blocks;
  int32_t block_size;
  int32_t table_width;
  int32_t block_bits;  // log2 of block_size, where it is a power of two; else -1
};

}  // namespace kvoffload::ascendc
