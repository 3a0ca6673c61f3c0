// Compact delivery: a step's rows gathered into a selection, and the pool refilled from it. Every argument is checked
// before the first byte moves.
#pragma once

#include "copies.h"
#include "requests.h"
#include "residency.h"

namespace kvoffload {

struct CompactView {
  const std::int32_t* kinds;        // [tokens, width, 2]
  const std::int32_t* seq_lens;     // [requests]
  const std::int32_t* block_table;  // [requests, table_width]
  const std::uint8_t* new_rows;     // [tokens, row_bytes]
  std::uint8_t* selection;          // [tokens, width, row_bytes]
  std::int64_t tokens;
  std::int64_t width;
  std::int64_t table_width;
};

// Returns the bytes fetched from the host pool.
std::int64_t dsa_serve_compact(const HostPoolView& host, const HotPoolView& hot, const RequestsView& requests,
                               const CompactView& compact);

struct InstallView {
  const std::uint8_t* selection;  // [tokens, width, row_bytes]
  const std::int32_t* positions;  // [requests, capacity]
  const std::int32_t* slots;      // [requests, capacity]
  const std::int32_t* counts;     // [requests]
  std::int64_t tokens;
  std::int64_t width;
  std::int64_t capacity;
};

// Returns the bytes copied. In order: of two rows for one slot the later stays.
std::int64_t dsa_install(const HotPoolView& hot, const RequestsView& requests, const InstallView& install);

}  // namespace kvoffload
