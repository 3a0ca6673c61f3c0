// Checks the assignment of a step's tokens to requests and rows.
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

// Checks: starts at 0, does not decrease, ends within `tokens`; `owner` names the argument with `tokens` entries.
void check_starts(const RequestsView& requests, std::int64_t tokens, const char* owner);

// Checks that rows of active requests are below `rows`; `owner` names the argument with `rows` entries.
void check_rows(const RequestsView& requests, std::int64_t rows, const char* owner);

// Checks that rows are unique: requests sharing a row would overwrite each other's state in the step. Rows must have
// been range-checked; `seen` has one entry per row, all zero before and after.
void check_rows_distinct(const RequestsView& requests, std::vector<std::uint8_t>& seen);

}  // namespace kvoffload
