#include "plan.h"

#include <algorithm>
#include <string>

#include "checks.h"
#include "isa.h"
#include "plan_request.h"
#include "requests.h"

namespace kvoffload {
namespace {

void check_buffers(const PlanInput& in, const PlanOutput& out) {
  require(out.width == in.width, "topk: width ", in.width, " differs from out.slots' ", out.width);
  require(in.tokens <= out.max_tokens, "topk: ", in.tokens, " tokens exceed out.slots' ", out.max_tokens);
  require(in.requests <= out.max_requests, "seq_lens: ", in.requests, " requests exceed out.miss_counts' ",
          out.max_requests);
  require(in.query_start_loc[0] == 0, "query_start_loc[0]: expected 0, got ", in.query_start_loc[0]);
}

// Returns the most ids of one request.
std::int64_t check_requests(const PlanInput& in, const ResidencyView& residency, const PlanOutput& out) {
  std::int64_t most_ids = 0;
  for (std::int64_t n = 0; n < in.requests; ++n) {
    const std::int64_t q = std::int64_t{in.query_start_loc[n + 1]} - in.query_start_loc[n];
    require(q >= 0, "query_start_loc[", n + 1, "]: ", in.query_start_loc[n + 1], " is less than its predecessor");
    require(in.query_start_loc[n + 1] <= in.tokens, "query_start_loc[", n + 1, "]: ", in.query_start_loc[n + 1],
            " exceeds topk's ", in.tokens, " tokens");
    if (in.rows[n] < 0 || q == 0) continue;
    require(in.rows[n] < residency.partitions, "rows[", n, "]: ", in.rows[n], " is outside the residency's ",
            residency.partitions, " partitions");
    require(in.seq_lens[n] >= q, "seq_lens[", n, "]: ", in.seq_lens[n], " is less than the query length ", q);
    require(q * in.width <= residency.slots(), "topk: ", q, " query tokens of ", in.width,
            " ids do not fit a partition of ", residency.slots(), " slots (request ", n, ")");
    require(q * in.width <= out.miss_capacity, "out.miss_ids: capacity ", out.miss_capacity,
            " is less than the ", q * in.width, " ids of request ", n);
    most_ids = std::max(most_ids, q * in.width);
  }
  return most_ids;
}

PlanRequestFn select_planner(const ResidencyView& residency) {
#if defined(KVOFFLOAD_X86)
  if (current_isa() == Isa::kAvx512) return avx512_planner(residency.policy, residency.placement, residency.ways());
  if (current_isa() == Isa::kAvx2) return avx2_planner(residency.policy, residency.placement, residency.ways());
#elif defined(KVOFFLOAD_NEON)
  if (current_isa() == Isa::kNeon) return neon_planner(residency.policy, residency.placement, residency.ways());
#endif
  return portable_planner(residency.policy, residency.placement, residency.ways());
}

RequestJob make_job(const PlanInput& in, const ResidencyView& residency, const PlanOutput& out, std::int64_t n) {
  const std::int64_t first = in.query_start_loc[n];
  const std::int64_t partition = in.rows[n];
  RequestJob job{};
  job.topk = in.topk + first * in.width;
  job.slots = out.slots + first * in.width;
  job.new_slots = out.new_slots + first;
  job.miss_ids = out.miss_ids + n * out.miss_capacity;
  job.miss_slots = out.miss_slots + n * out.miss_capacity;
  job.miss_count = out.miss_counts + n;
  if (out.kinds != nullptr) {
    job.kinds = out.kinds + 2 * first * in.width;
    job.miss_positions = out.miss_positions + n * out.miss_capacity;
  }
  job.tags = residency.tags + partition * residency.slots();
  job.ages = residency.ages + partition * residency.slots();
  job.hands = residency.hands + partition * residency.sets;
  job.high = residency.high + partition;
  job.query_tokens = static_cast<std::int32_t>(in.query_start_loc[n + 1] - first);
  job.width = static_cast<std::int32_t>(in.width);
  job.seq_len = in.seq_lens[n];
  job.sets = static_cast<std::int32_t>(residency.sets);
  return job;
}

// Request n's partition, if its ids cover most of its cache lines; otherwise they are fetched one by one.
NextPartitionView next_partition(const PlanInput& in, const ResidencyView& residency, std::int64_t n) {
  if (n >= in.requests || in.rows[n] < 0) return {};
  const std::int64_t ids = (std::int64_t{in.query_start_loc[n + 1]} - in.query_start_loc[n]) * in.width;
  if (residency.slots() > kDense * ids) return {};
  const std::int64_t first = in.rows[n] * residency.slots();
  return {residency.tags + first, residency.ages + first, residency.slots()};
}

void fill_unplanned(const PlanOutput& out, std::int64_t first, std::int64_t last) {
  std::fill(out.slots + first * out.width, out.slots + last * out.width, -1);
  std::fill(out.new_slots + first, out.new_slots + last, -1);
  if (out.kinds == nullptr) return;
  for (std::int64_t i = first * out.width; i < last * out.width; ++i) {
    out.kinds[2 * i] = kInvalid;
    out.kinds[2 * i + 1] = -1;
  }
}

}  // namespace

void check_residency(const ResidencyView& residency) {
  const std::int64_t sets = residency.sets;
  require(residency.ways() == 16 || residency.ways() == 32, "residency.tags: ways must be 16 or 32, got ",
          residency.ways());
  require(sets > 0 && (sets & (sets - 1)) == 0, "residency.tags: the number of sets must be a power of two, got ", sets);
  require(residency.placement == Placement::kOneSet || sets > 1,
          "residency.tags: ids with two sets need at least two sets, got ", sets);
  require(residency.slots() <= INT32_MAX, "residency.tags: a partition must have less than 2^31 slots, got ",
          residency.slots());
}

void dsa_plan(const PlanInput& in, const ResidencyView& residency, const PlanOutput& out, Workspace& workspace) {
  check_residency(residency);
  check_buffers(in, out);
  const std::int64_t most_ids = check_requests(in, residency, out);
  workspace.reserve(residency.slots(), most_ids, residency.partitions);
  check_partitions_distinct({in.query_start_loc, in.rows, in.requests}, workspace.partition_seen());

  const PlanRequestFn plan_request = select_planner(residency);
  const Scratch scratch = workspace.scratch();
  PlanStats stats;
  bool fetched = false;
  for (std::int64_t n = 0; n < in.requests; ++n) {
    const std::int64_t first = in.query_start_loc[n];
    const std::int64_t last = in.query_start_loc[n + 1];
    if (in.rows[n] < 0 || first == last) {
      out.miss_counts[n] = 0;
      fill_unplanned(out, first, last);
      fetched = false;
      continue;
    }
    RequestJob job = make_job(in, residency, out, n);
    job.fetched = fetched;
    job.expected_misses = n > 0 ? out.miss_counts[n - 1] : 0;  // the requests of a step are similar
    job.next = next_partition(in, residency, n + 1);
    fetched = job.next.slots > 0;
    plan_request(job, scratch, stats);
  }
  fill_unplanned(out, in.query_start_loc[in.requests], in.tokens);
  const std::int64_t values[kStatsCount] = {stats.hits,      stats.misses,     stats.new_tokens,
                                            stats.displaced, stats.duplicates, stats.invalid};
  std::copy(values, values + kStatsCount, out.stats);
}

}  // namespace kvoffload
