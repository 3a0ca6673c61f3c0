// CANN's plan and install on our residency: 16 ways, fifo. See vllm_kvoffload/ops/conformance.py.
#pragma once

#include "requests.h"
#include "residency.h"

namespace kvoffload {

inline constexpr std::int64_t kChunks = 8;  // of the positions of a query; each keeps its own list of records
inline constexpr std::int64_t kRecordInts = 4;  // set, id, query, position

struct RecordsView {
  std::int32_t* records;  // [requests, queries, kChunks, capacity, kRecordInts]
  std::int32_t* counts;   // [requests, queries, kChunks]
  std::int64_t queries;
  std::int64_t capacity;

  std::int64_t chunk(std::int64_t request, std::int64_t query, std::int64_t chunk) const {
    return (request * queries + query) * kChunks + chunk;
  }
  std::int32_t* record(std::int64_t chunk, std::int64_t index) const {
    return records + (chunk * capacity + index) * kRecordInts;
  }
};

struct ConformancePlanView {
  const std::int32_t* topk;      // [tokens, width]
  const std::int32_t* seq_lens;  // [requests]
  std::int32_t* kinds;           // [tokens, width, 2]
  std::int32_t* actual;          // [tokens]
  std::int64_t tokens;
  std::int64_t width;
  std::int64_t id_range;
};

// Reads the residency. Every argument is checked before anything is written.
void conformance_plan(const RequestsView& requests, const ResidencyView& residency, const ConformancePlanView& plan,
                      const RecordsView& records);

struct InstallListView {
  std::int32_t* positions;  // [requests, capacity]
  std::int32_t* slots;      // [requests, capacity]
  std::int32_t* counts;     // [requests]
  std::int64_t capacity;
};

// Writes tags and hands only with `metadata_update`.
void conformance_install(const RequestsView& requests, const ResidencyView& residency, const RecordsView& records,
                         std::int64_t width, std::int64_t id_range, bool metadata_update,
                         const InstallListView& list);

}  // namespace kvoffload
