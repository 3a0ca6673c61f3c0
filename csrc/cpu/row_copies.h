// Helpers shared by the row copies: the address of a token's host row, and copies of many rows.
#pragma once

#include <cstring>
#include <vector>

#include "checks.h"
#include "copies.h"

namespace kvoffload {

struct Copy {
  const std::uint8_t* from;
  std::uint8_t* to;
};

inline std::int64_t checked_block(const HostPoolView& host, const std::int32_t* table, std::int64_t width,
                                  std::int64_t index, std::int64_t request) {
  require(index < width, "block_table: block ", index, " of request ", request, " is outside its ", width,
          " entries");
  const std::int64_t block = table[index];
  require(block >= 0 && block < host.blocks, "block_table[", request, ", ", index, "]: block ", block,
          " is outside the host pool's ", host.blocks, " blocks");
  return block;
}

// The row of token `id`, not negative, of a request whose block table has `width` entries.
inline const std::uint8_t* host_row(const HostPoolView& host, const std::int32_t* table, std::int64_t width,
                                    std::int64_t id, std::int64_t request) {
  const std::int64_t block = checked_block(host, table, width, id / host.block_size, request);
  return host.data + (block * host.block_size + id % host.block_size) * host.row_bytes;
}

// A host row's first line is a cache and TLB miss; asking for a few rows ahead overlaps them.
inline constexpr std::size_t kRowsAhead = 4;

inline void copy_all(const std::vector<Copy>& copies, std::int64_t row_bytes) {
  const auto bytes = static_cast<std::size_t>(row_bytes);
  for (std::size_t i = 0; i < copies.size(); ++i) {
    if (i + kRowsAhead < copies.size()) __builtin_prefetch(copies[i + kRowsAhead].from);
    std::memcpy(copies[i].to, copies[i].from, bytes);
  }
}

}  // namespace kvoffload
