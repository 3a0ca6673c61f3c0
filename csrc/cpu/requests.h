// Checks the assignment of a step's tokens to requests and partitions (the argument `rows`).
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

// Checks that partitions of active requests are below `partitions`; `owner` names the argument that has them.
void check_partitions(const RequestsView& requests, std::int64_t partitions, const char* owner);

// Checks that partitions are unique: requests sharing one would overwrite each other's state in the step. They must
// have been range-checked; `seen` has one entry per partition, all zero before and after.
void check_partitions_distinct(const RequestsView& requests, std::vector<std::uint8_t>& seen);

}  // namespace kvoffload
