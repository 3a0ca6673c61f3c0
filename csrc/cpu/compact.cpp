#include "compact.h"

#include "row_copies.h"

namespace kvoffload {
namespace {

// Address of each position's row; null: zeros.
using Sources = std::vector<const std::uint8_t*>;

class Collector {
 public:
  Collector(const HostPoolView& host, const HotPoolView& hot, const RequestsView& requests,
            const CompactView& compact, Sources& sources)
      : host_(host), hot_(hot), requests_(requests), compact_(compact), sources_(sources) {}

  // Returns the rows to be fetched from the host pool.
  std::int64_t request(std::int64_t n) {
    std::int64_t fetched = 0;
    for (std::int64_t t = requests_.first(n); t < requests_.last(n); ++t) {
      for (std::int64_t k = 0; k < compact_.width; ++k) {
        const std::int64_t at = t * compact_.width + k;
        sources_[static_cast<std::size_t>(at)] = source(n, t, k, compact_.kinds[2 * at], compact_.kinds[2 * at + 1]);
        fetched += compact_.kinds[2 * at] == kOldMiss;
      }
    }
    return fetched;
  }

 private:
  const std::uint8_t* source(std::int64_t n, std::int64_t t, std::int64_t k, std::int32_t kind, std::int64_t index) {
    if (kind == kPoolHit) {
      require(index >= 0 && index < hot_.slots, "kinds[", t, ", ", k, "]: slot ", index, " is outside the ",
              hot_.slots, " slots of a partition");
      return hot_.data + (requests_.rows[n] * hot_.slots + index) * hot_.row_bytes;
    }
    if (kind == kOldMiss) {
      require(index >= 0, "kinds[", t, ", ", k, "]: negative id ", index);
      const std::int32_t* table = compact_.block_table + n * compact_.table_width;
      return host_row(host_, table, compact_.table_width, index, n);
    }
    if (kind == kDecodeWindow) {
      const std::int64_t query_len = requests_.query_len(n);
      const std::int64_t stable = compact_.seq_lens[n] - query_len;
      require(index >= stable && index < stable + query_len, "kinds[", t, ", ", k, "]: id ", index,
              " is none of the ", query_len, " new tokens from ", stable, " on");
      return compact_.new_rows + (requests_.first(n) + index - stable) * host_.row_bytes;
    }
    require(kind == kInvalid || kind == kFutureSkip || kind == kNegativeStop, "kinds[", t, ", ", k,
            "]: unknown kind ", kind);
    return nullptr;
  }

  const HostPoolView& host_;
  const HotPoolView& hot_;
  const RequestsView& requests_;
  const CompactView& compact_;
  Sources& sources_;
};

}  // namespace

std::int64_t dsa_serve_compact(const HostPoolView& host, const HotPoolView& hot, const RequestsView& requests,
                               const CompactView& compact) {
  require(host.row_bytes == hot.row_bytes, "hot: row of ", hot.row_bytes, " bytes, but the host pool's has ",
          host.row_bytes);
  require(host.block_size > 0, "host: blocks of no tokens");
  check_starts(requests, compact.tokens, "new_rows");
  check_partitions(requests, hot.partitions, "hot pool");
  thread_local Sources sources;  // kept: one call per layer and step
  sources.assign(static_cast<std::size_t>(compact.tokens * compact.width), nullptr);
  Collector collector(host, hot, requests, compact, sources);
  std::int64_t fetched = 0;
  for (std::int64_t n = 0; n < requests.count; ++n) {
    if (requests.rows[n] >= 0) fetched += collector.request(n);
  }
  const auto bytes = static_cast<std::size_t>(host.row_bytes);
  std::uint8_t* to = compact.selection;
  for (std::size_t i = 0; i < sources.size(); ++i, to += bytes) {
    if (i + kRowsAhead < sources.size()) __builtin_prefetch(sources[i + kRowsAhead]);
    if (sources[i] != nullptr) {
      std::memcpy(to, sources[i], bytes);
    } else {
      std::memset(to, 0, bytes);
    }
  }
  return fetched * host.row_bytes;
}

std::int64_t dsa_install(const HotPoolView& hot, const RequestsView& requests, const InstallView& install) {
  check_starts(requests, install.tokens, "selection");
  check_partitions(requests, hot.partitions, "hot pool");
  thread_local std::vector<Copy> copies;
  copies.clear();
  for (std::int64_t n = 0; n < requests.count; ++n) {
    if (requests.rows[n] < 0) continue;
    const std::int64_t count = install.counts[n];
    const std::int64_t positions = requests.query_len(n) * install.width;
    require(count >= 0 && count <= install.capacity, "miss_counts[", n, "]: ", count, " is outside 0..",
            install.capacity);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t position = install.positions[n * install.capacity + i];
      const std::int64_t slot = install.slots[n * install.capacity + i];
      require(position >= 0 && position < positions, "miss_positions[", n, ", ", i, "]: ", position,
              " is outside the request's ", positions, " positions");
      require(slot >= 0 && slot < hot.slots, "miss_slots[", n, ", ", i, "]: ", slot, " is outside the ", hot.slots,
              " slots of a partition");
      copies.push_back({install.selection + (requests.first(n) * install.width + position) * hot.row_bytes,
                        hot.data + (requests.rows[n] * hot.slots + slot) * hot.row_bytes});
    }
  }
  copy_all(copies, hot.row_bytes);
  return static_cast<std::int64_t>(copies.size()) * hot.row_bytes;
}

}  // namespace kvoffload
