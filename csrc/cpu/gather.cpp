#include "gather.h"

#include <algorithm>

#include "id_table.h"
#include "row_copies.h"

namespace kvoffload {
namespace {

constexpr std::int32_t kNowhere = -1;

// Kept by each thread from call to call.
struct Scratch {
  IdTable table;                     // wanted id -> its number
  std::vector<std::int32_t> wanted;  // distinct valid ids in order of first occurrence
  std::vector<std::int32_t> place;   // of each wanted id in the previous selection, or kNowhere
  std::vector<std::int32_t> moving;  // numbers of hits behind the new end, in order of place
  std::vector<std::int32_t> ids;     // the new selection by place, kNowhere: free
  std::vector<Copy> copies;
};

// One query of one request.
struct Query {
  std::int64_t request;
  std::int64_t first;   // the request's first token
  std::int64_t token;
  std::int32_t stable;
  std::int32_t limit;   // its own position
  std::uint8_t* rows;   // [width, row_bytes]
  std::int32_t* status; // [width + 1]
};

class Gatherer {
 public:
  Gatherer(const HostPoolView& host, const GatherView& gather, Scratch& scratch)
      : host_(host), gather_(gather), scratch_(scratch) {
    scratch_.table.clear();
    scratch_.table.reserve(gather.width);
  }

  // Returns the rows fetched from the host pool.
  std::int64_t run(const Query& query) {
    choose_wanted(query);
    find_hits(query);
    scratch_.copies.clear();
    std::size_t free = move_hits(query);
    const std::int64_t fetched = fill(query, free);
    copy_all(scratch_.copies, host_.row_bytes);
    std::copy(scratch_.ids.begin(), scratch_.ids.end(), query.status);
    std::fill(query.status + scratch_.ids.size(), query.status + gather_.width, -1);
    query.status[gather_.width] = static_cast<std::int32_t>(scratch_.ids.size());
    gather_.lengths[query.token] = query.status[gather_.width];
    scratch_.table.clear();
    return fetched;
  }

 private:
  void choose_wanted(const Query& query) {
    scratch_.wanted.clear();
    const std::int32_t* ids = gather_.topk + query.token * gather_.width;
    for (std::int64_t k = 0; k < gather_.width; ++k) {
      if (ids[k] < 0 || ids[k] > query.limit) continue;
      if (scratch_.table.insert(ids[k], static_cast<std::int32_t>(scratch_.wanted.size()))) {
        scratch_.wanted.push_back(ids[k]);
      }
    }
  }

  // Ids from `stable` on are no hits: their rows may be those of rejected drafts.
  void find_hits(const Query& query) {
    const auto count = static_cast<std::int32_t>(scratch_.wanted.size());
    scratch_.place.assign(scratch_.wanted.size(), kNowhere);
    scratch_.ids.assign(scratch_.wanted.size(), kNowhere);
    scratch_.moving.clear();
    for (std::int32_t place = 0; place < query.status[gather_.width]; ++place) {
      const std::int32_t id = query.status[place];
      if (id < 0 || id >= query.stable) continue;
      const std::int32_t number = scratch_.table.find(id);
      if (number < 0 || scratch_.place[static_cast<std::size_t>(number)] != kNowhere) continue;
      scratch_.place[static_cast<std::size_t>(number)] = place;
      if (place < count) {
        scratch_.ids[static_cast<std::size_t>(place)] = id;
      } else {
        scratch_.moving.push_back(number);
      }
    }
  }

  std::size_t next_free(std::size_t from) const {
    while (from < scratch_.ids.size() && scratch_.ids[from] != kNowhere) ++from;
    return from;
  }

  std::uint8_t* row(const Query& query, std::size_t place) const {
    return query.rows + static_cast<std::int64_t>(place) * host_.row_bytes;
  }

  // From behind the new end, where nothing is written. Returns a place before which none is free.
  std::size_t move_hits(const Query& query) {
    std::size_t free = 0;
    for (const std::int32_t number : scratch_.moving) {
      free = next_free(free);
      const auto at = static_cast<std::size_t>(number);
      scratch_.ids[free] = scratch_.wanted[at];
      scratch_.copies.push_back({row(query, static_cast<std::size_t>(scratch_.place[at])), row(query, free)});
    }
    return free;
  }

  std::int64_t fill(const Query& query, std::size_t free) {
    std::int64_t fetched = 0;
    const std::int32_t* table = gather_.block_table + query.request * gather_.table_width;
    for (std::size_t i = 0; i < scratch_.wanted.size(); ++i) {
      if (scratch_.place[i] != kNowhere) continue;
      const std::int32_t id = scratch_.wanted[i];
      free = next_free(free);
      scratch_.ids[free] = id;
      const std::uint8_t* from = gather_.new_rows + (query.first + id - query.stable) * host_.row_bytes;
      if (id < query.stable) {
        from = host_row(host_, table, gather_.table_width, id, query.request);
        ++fetched;
      }
      scratch_.copies.push_back({from, row(query, free)});
    }
    return fetched;
  }

  const HostPoolView& host_;
  const GatherView& gather_;
  Scratch& scratch_;
};

std::int32_t* status_of(const GatherView& gather, std::int64_t partition, std::int64_t query) {
  return gather.status + (partition * gather.queries + query) * (gather.width + 1);
}

void check_request(const HostPoolView& host, const RequestsView& requests, const GatherView& gather, std::int64_t n) {
  const std::int64_t query_len = requests.query_len(n);
  const std::int64_t stable = gather.seq_lens[n] - query_len;
  require(query_len <= gather.queries, "selection: ", gather.queries, " queries per partition are too few for the ",
          query_len, " of request ", n);
  require(stable >= 0, "seq_lens[", n, "]: ", gather.seq_lens[n], " is less than the query length ", query_len);
  for (std::int64_t s = 0; s < query_len; ++s) {
    const std::int32_t count = status_of(gather, requests.rows[n], s)[gather.width];
    require(count >= 0 && count <= gather.width, "status[", requests.rows[n], ", ", s, "]: length ", count,
            " is outside 0..", gather.width);
  }
  const std::int32_t* ids = gather.topk + requests.first(n) * gather.width;
  const std::int32_t* table = gather.block_table + n * gather.table_width;
  for (std::int64_t i = 0; i < query_len * gather.width; ++i) {
    if (ids[i] >= 0 && ids[i] < stable) host_row(host, table, gather.table_width, ids[i], n);
  }
}

std::int64_t gather_request(Gatherer& gatherer, const HostPoolView& host, const RequestsView& requests,
                            const GatherView& gather, std::int64_t n) {
  const std::int64_t partition = requests.rows[n];
  const std::int64_t query_len = requests.query_len(n);
  std::int64_t fetched = 0;
  for (std::int64_t s = 0; s < query_len; ++s) {
    Query query{};
    query.request = n;
    query.first = requests.first(n);
    query.token = query.first + s;
    query.stable = static_cast<std::int32_t>(gather.seq_lens[n] - query_len);
    query.limit = static_cast<std::int32_t>(query.stable + s);
    query.rows = gather.selection + (partition * gather.queries + s) * gather.width * host.row_bytes;
    query.status = status_of(gather, partition, s);
    fetched += gatherer.run(query);
  }
  // A draft that is accepted later must not meet the row of one rejected earlier.
  for (std::int64_t s = query_len; s < gather.queries; ++s) status_of(gather, partition, s)[gather.width] = 0;
  return fetched;
}

}  // namespace

std::int64_t gather_selection(const HostPoolView& host, const RequestsView& requests, const GatherView& gather) {
  require(host.block_size > 0, "host: blocks of no tokens");
  check_starts(requests, gather.tokens, "topk");
  check_partitions(requests, gather.partitions, "selection");
  thread_local std::vector<std::uint8_t> seen;
  seen.resize(std::max(seen.size(), static_cast<std::size_t>(gather.partitions)));
  check_partitions_distinct(requests, seen);
  for (std::int64_t n = 0; n < requests.count; ++n) {
    if (requests.active(n)) check_request(host, requests, gather, n);
  }
  thread_local Scratch scratch;
  Gatherer gatherer(host, gather, scratch);
  std::fill(gather.lengths, gather.lengths + gather.tokens, 0);
  std::int64_t fetched = 0;
  for (std::int64_t n = 0; n < requests.count; ++n) {
    if (requests.active(n)) fetched += gather_request(gatherer, host, requests, gather, n);
  }
  return fetched * host.row_bytes;
}

void gather_reuse(const std::int32_t* status, std::int64_t partitions, std::int64_t queries, std::int64_t status_width,
                  const RequestsView& requests, std::int32_t* lengths, std::int64_t tokens) {
  check_starts(requests, tokens, "lengths");
  check_partitions(requests, partitions, "status");
  for (std::int64_t n = 0; n < requests.count; ++n) {
    require(!requests.active(n) || requests.query_len(n) <= queries, "status: ", queries,
            " queries per partition are too few for the ", requests.query_len(n), " of request ", n);
  }
  std::fill(lengths, lengths + tokens, 0);
  for (std::int64_t n = 0; n < requests.count; ++n) {
    for (std::int64_t s = 0; requests.active(n) && s < requests.query_len(n); ++s) {
      lengths[requests.first(n) + s] = status[(requests.rows[n] * queries + s + 1) * status_width - 1];
    }
  }
}

}  // namespace kvoffload
