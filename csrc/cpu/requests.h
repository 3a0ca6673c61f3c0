// Checks of how a step's tokens are divided among requests and rows.
#pragma once

#include <cstdint>
#include <vector>

namespace kvoffload {

struct RequestsView {
  const std::int32_t* starts;  // [count + 1], query_start_loc
  const std::int32_t* rows;    // [count], negative: skip
  std::int64_t count;

  std::int64_t first(std::int64_t n) const { return starts[n]; }
  std::int64_t last(std::int64_t n) const { return starts[n + 1]; }
  std::int64_t query_len(std::int64_t n) const { return last(n) - first(n); }
  bool active(std::int64_t n) const { return rows[n] >= 0 && starts[n + 1] > starts[n]; }
};

// Starts at 0, does not decrease, ends within `tokens`; `owner` is the argument that has so many.
void check_starts(const RequestsView& requests, std::int64_t tokens, const char* owner);

// Rows of the active requests are below `rows`; `owner` is the argument that has so many.
void check_rows(const RequestsView& requests, std::int64_t rows, const char* owner);

// Two requests on one row would overwrite each other's state within the step. Rows must have been checked; `seen` has
// an entry for each, all zero before and after.
void check_rows_distinct(const RequestsView& requests, std::vector<std::uint8_t>& seen);

}  // namespace kvoffload
