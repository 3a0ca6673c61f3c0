#include "conformance.h"

#include <algorithm>

#include "checks.h"
#include "id_table.h"

namespace kvoffload {
namespace {

constexpr int kWays = 16;

void check_residency(const ResidencyView& residency, std::int64_t id_range) {
  require(residency.placement == Placement::kOneSet, "residency: the conformance mode places an id in one set");
  require(residency.set_ways == kWays, "residency: the conformance mode has ", kWays, " ways, not ",
          residency.set_ways);
  require(residency.policy == Policy::kFifo, "residency: the conformance mode's policy is fifo");
  require(residency.slots() <= INT32_MAX, "residency: a partition must have less than 2^31 slots, got ",
          residency.slots());
  require(id_range > 0, "id_range: must be positive, got ", id_range);
}

void check_queries(const RequestsView& requests, const RecordsView& records) {
  for (std::int64_t n = 0; n < requests.count; ++n) {
    require(!requests.active(n) || requests.query_len(n) <= records.queries, "records: ", records.queries,
            " queries are too few for the ", requests.query_len(n), " of request ", n);
  }
}

class QueryPlan {
 public:
  QueryPlan(const RequestsView& requests, const ResidencyView& residency, const ConformancePlanView& plan,
            const RecordsView& records, std::int64_t n, std::int64_t s)
      : plan_(plan), records_(records), request_(n), query_(s), token_(requests.first(n) + s),
        tags_(residency.tags + requests.rows[n] * residency.slots()), set_mask_(residency.sets - 1) {
    const std::int64_t length = plan.seq_lens[n];
    const std::int64_t query_len = requests.query_len(n);
    limit_ = length - (query_len - 1 - s) - 1;
    oldest_new_ = std::max<std::int64_t>(length - query_len - 1, 0) + 1;
  }

  void run() {
    const std::int64_t size = (plan_.width + kChunks - 1) / kChunks;
    for (std::int64_t chunk = 0; chunk < kChunks; ++chunk) {
      const std::int64_t begin = std::min(chunk * size, plan_.width);
      run_chunk(records_.chunk(request_, query_, chunk), begin, std::min(begin + size, plan_.width));
    }
    std::int32_t actual = 0;
    for (std::int64_t k = 0; k < plan_.width && ids()[k] >= 0; ++k) actual += ids()[k] <= limit_;
    plan_.actual[token_] = actual;
  }

 private:
  const std::int32_t* ids() const { return plan_.topk + token_ * plan_.width; }

  void run_chunk(std::int64_t chunk, std::int64_t begin, std::int64_t end) {
    bool stopped = begin > 0 && ids()[begin - 1] < 0;
    std::int32_t& count = records_.counts[chunk];
    count = 0;
    for (std::int64_t k = begin; k < end; ++k) {
      std::int32_t* kind = plan_.kinds + 2 * (token_ * plan_.width + k);
      if (stopped) {
        kind[0] = kInvalid;
        kind[1] = -1;
        continue;
      }
      classify(ids()[k], kind);
      stopped = kind[0] == kNegativeStop;
      if (kind[0] != kOldMiss) continue;
      const std::int32_t record[] = {set_of(kind[1]), kind[1], static_cast<std::int32_t>(query_),
                                     static_cast<std::int32_t>(k)};
      std::copy(record, record + kRecordInts, records_.record(chunk, count++));
    }
  }

  void classify(std::int32_t id, std::int32_t* kind) const {
    kind[1] = id;
    if (id < 0) {
      kind[0] = kNegativeStop;
    } else if (id > limit_) {
      kind[0] = kFutureSkip;
    } else if (id >= oldest_new_) {
      kind[0] = kDecodeWindow;
    } else if (const std::int32_t slot = find(id); slot >= 0) {
      kind[0] = kPoolHit;
      kind[1] = slot;
    } else {
      kind[0] = kOldMiss;
    }
  }

  std::int32_t set_of(std::int32_t id) const { return id & static_cast<std::int32_t>(set_mask_); }

  std::int32_t find(std::int32_t id) const {
    if (id >= plan_.id_range) return -1;
    const std::int32_t first = set_of(id) * kWays;
    for (std::int32_t way = 0; way < kWays; ++way) {
      if (tags_[first + way] == id) return first + way;
    }
    return -1;
  }

  const ConformancePlanView& plan_;
  const RecordsView& records_;
  const std::int64_t request_, query_, token_;
  const std::int32_t* const tags_;
  const std::int64_t set_mask_;
  std::int64_t limit_, oldest_new_;
};

// One partition's install: serial, so that the pointers move the same way for every layer.
class RowInstall {
 public:
  RowInstall(const ResidencyView& residency, const RecordsView& records, std::int64_t width, std::int64_t id_range,
             IdTable& seen)
      : residency_(residency), records_(records), width_(width), id_range_(id_range), seen_(seen) {}

  // `tags` may be null: no metadata. Returns the number of slots listed.
  std::int32_t run(std::int64_t n, std::int64_t query_len, std::uint8_t* hands, std::int32_t* tags,
                   std::int32_t* positions, std::int32_t* slots) {
    std::int32_t listed = 0;
    for (std::int64_t s = 0; s < query_len; ++s) {
      for (std::int64_t o = 0; o < kChunks; ++o) {
        const std::int64_t chunk = records_.chunk(n, s, o);
        const std::int64_t count = std::clamp<std::int64_t>(records_.counts[chunk], 0, records_.capacity);
        for (std::int64_t i = 0; i < count; ++i) {
          const std::int32_t* record = records_.record(chunk, i);
          if (!in_range(record, query_len) || !seen_.insert(record[1], 0)) continue;
          const int way = hands[record[0]] & (kWays - 1);
          hands[record[0]] = static_cast<std::uint8_t>((way + 1) & (kWays - 1));
          const std::int32_t slot = record[0] * kWays + way;
          if (tags != nullptr) tags[slot] = record[1];
          slots[listed] = slot;
          positions[listed++] = record[2] * static_cast<std::int32_t>(width_) + record[3];
        }
      }
    }
    seen_.clear();
    return listed;
  }

 private:
  bool in_range(const std::int32_t* record, std::int64_t query_len) const {
    return record[0] >= 0 && record[0] < residency_.sets && record[1] >= 0 && record[1] < id_range_ &&
           record[2] >= 0 && record[2] < query_len && record[3] >= 0 && record[3] < width_;
  }

  const ResidencyView& residency_;
  const RecordsView& records_;
  const std::int64_t width_, id_range_;
  IdTable& seen_;
};

}  // namespace

void conformance_plan(const RequestsView& requests, const ResidencyView& residency, const ConformancePlanView& plan,
                      const RecordsView& records) {
  check_residency(residency, plan.id_range);
  check_starts(requests, plan.tokens, "topk");
  check_partitions(requests, residency.partitions, "residency");
  check_queries(requests, records);
  for (std::int64_t i = 0; i < plan.tokens * plan.width; ++i) {
    plan.kinds[2 * i] = kInvalid;
    plan.kinds[2 * i + 1] = -1;
  }
  std::fill(plan.actual, plan.actual + plan.tokens, 0);
  for (std::int64_t n = 0; n < requests.count; ++n) {
    const std::int64_t chunks = records.queries * kChunks;
    std::fill(records.counts + n * chunks, records.counts + (n + 1) * chunks, 0);
    if (!requests.active(n)) continue;
    for (std::int64_t s = 0; s < requests.query_len(n); ++s) QueryPlan(requests, residency, plan, records, n, s).run();
  }
}

void conformance_install(const RequestsView& requests, const ResidencyView& residency, const RecordsView& records,
                         std::int64_t width, std::int64_t id_range, bool metadata_update,
                         const InstallListView& list) {
  check_residency(residency, id_range);
  check_starts(requests, INT32_MAX, "query_start_loc");
  check_partitions(requests, residency.partitions, "residency");
  check_queries(requests, records);
  thread_local std::vector<std::uint8_t> seen_partitions;
  seen_partitions.resize(std::max(seen_partitions.size(), static_cast<std::size_t>(residency.partitions)));
  check_partitions_distinct(requests, seen_partitions);
  thread_local IdTable seen;
  thread_local std::vector<std::uint8_t> copied_hands;
  seen.reserve(records.queries * kChunks * records.capacity);
  RowInstall install(residency, records, width, id_range, seen);
  for (std::int64_t n = 0; n < requests.count; ++n) {
    list.counts[n] = 0;
    if (!requests.active(n)) continue;
    std::uint8_t* hands = residency.hands + requests.rows[n] * residency.sets;
    std::int32_t* tags = residency.tags + requests.rows[n] * residency.slots();
    if (!metadata_update) {
      copied_hands.assign(hands, hands + residency.sets);
      hands = copied_hands.data();
      tags = nullptr;
    }
    list.counts[n] = install.run(n, requests.query_len(n), hands, tags, list.positions + n * list.capacity,
                                 list.slots + n * list.capacity);
  }
}

}  // namespace kvoffload
