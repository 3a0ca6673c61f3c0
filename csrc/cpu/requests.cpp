#include "requests.h"

#include "checks.h"

namespace kvoffload {

void check_starts(const RequestsView& requests, std::int64_t tokens, const char* owner) {
  require(requests.starts[0] == 0, "query_start_loc[0]: expected 0, got ", requests.starts[0]);
  for (std::int64_t n = 0; n < requests.count; ++n) {
    require(requests.query_len(n) >= 0, "query_start_loc[", n + 1, "]: ", requests.last(n),
            " is less than its predecessor");
    require(requests.last(n) <= tokens, "query_start_loc[", n + 1, "]: ", requests.last(n), " exceeds ", owner, "'s ",
            tokens, " tokens");
  }
}

void check_partitions(const RequestsView& requests, std::int64_t partitions, const char* owner) {
  for (std::int64_t n = 0; n < requests.count; ++n) {
    require(!requests.active(n) || requests.rows[n] < partitions, "rows[", n, "]: ", requests.rows[n],
            " is outside the ", owner, "'s ", partitions, " partitions");
  }
}

void check_partitions_distinct(const RequestsView& requests, std::vector<std::uint8_t>& seen) {
  std::int64_t clash = -1;
  std::int64_t marked = 0;
  for (; marked < requests.count && clash < 0; ++marked) {
    if (!requests.active(marked)) continue;
    std::uint8_t& mark = seen[static_cast<std::size_t>(requests.rows[marked])];
    if (mark != 0) clash = marked;
    mark = 1;
  }
  for (std::int64_t n = 0; n < marked; ++n) {
    if (requests.active(n)) seen[static_cast<std::size_t>(requests.rows[n])] = 0;
  }
  require(clash < 0, "rows[", clash, "]: partition ", clash < 0 ? 0 : requests.rows[clash],
          " belongs to an earlier request too");
}

}  // namespace kvoffload
