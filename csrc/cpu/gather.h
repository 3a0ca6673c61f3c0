// The baseline: a selection per partition and query that keeps the previous step's rows. See oracle/gather.py.
#pragma once

#include "copies.h"
#include "requests.h"

namespace kvoffload {

struct GatherView {
  const std::int32_t* topk;         // [tokens, width]
  const std::int32_t* seq_lens;     // [requests]
  const std::int32_t* block_table;  // [requests, table_width]
  const std::uint8_t* new_rows;     // [tokens, row_bytes]
  std::uint8_t* selection;          // [partitions, queries, width, row_bytes]
  std::int32_t* status;             // [partitions, queries, width + 1]
  std::int32_t* lengths;            // [tokens]
  std::int64_t tokens;
  std::int64_t width;
  std::int64_t table_width;
  std::int64_t partitions;
  std::int64_t queries;
};

// Returns the bytes fetched from the host pool. Every argument is checked before the first byte moves.
std::int64_t gather_selection(const HostPoolView& host, const RequestsView& requests, const GatherView& gather);

// Lengths of the selections as they are. status [partitions, queries, status_width].
void gather_reuse(const std::int32_t* status, std::int64_t partitions, std::int64_t queries, std::int64_t status_width,
                  const RequestsView& requests, std::int32_t* lengths, std::int64_t tokens);

}  // namespace kvoffload
