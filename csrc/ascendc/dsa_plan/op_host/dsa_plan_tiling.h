// Tiling of dsa_plan. Pure C++.
#pragma once

#include "../../../policies/policies.h"
#include "../../common/tiling.h"
#include "../op_kernel/dsa_plan_tiling_data.h"

namespace kvoffload::ascendc {

// The least sets of a part: their hands are one byte each, and two cores must not write one line.
inline constexpr int64_t kMinPartSets = kLineBytes;

struct PlanShape {
  int64_t requests;
  int64_t tokens;
  int64_t width;
  int64_t max_query;
  int64_t rows;
  int64_t sets;
  int64_t ways;
  int64_t policy;
  int64_t miss_capacity;
  bool compact;
};

// Select keeps this much of the unified buffer for itself.
inline constexpr int64_t kSelectBytes = 8 * 1024;

// Bytes of the unified buffer that the first phase needs for a part of `part_sets` sets; as PlanSets::init.
inline int64_t plan_sets_bytes(const PlanShape& shape, int64_t padded, int64_t part_sets) {
  const int64_t slots = part_sets * shape.ways;
  const int64_t list = padded > kScanSlots ? padded : kScanSlots;
  const int64_t requests = 2 * ub_ints(shape.requests) + ub_ints(shape.requests + 1);
  const int64_t state = slots * 4 + slots + slots / 8 + align_up(part_sets, kUbBlockBytes) + kUbBlockBytes;
  const int64_t positions = 2 * ub_ints(shape.max_query * padded) + 3 * ub_ints(list) + ub_ints(list / 2);
  const int64_t masks = align_up(shape.max_query * padded / 8, kUbBlockBytes) + align_up(padded / 8, kUbBlockBytes);
  const int64_t look_up = 3 * kLookUpIds * kUbBlockBytes + 7 * kLookUpIds * 4 + kLookUpIds + 3 * kUbBlockBytes;
  const int64_t scan = kScanSlots / 8 + 3 * kScanSlots + 2 * kLineBytes;
  return requests + state + positions + masks + look_up + scan + kRecordInts * 4 + kSelectBytes;
}

// As PlanRows::init.
inline int64_t plan_rows_bytes(const PlanShape& shape, int64_t padded, int64_t parts, int64_t id_table_bits) {
  const int64_t slots = shape.sets * shape.ways;
  const int64_t requests = 2 * ub_ints(shape.requests) + ub_ints(shape.requests + 1);
  const int64_t positions = 2 * ub_ints(shape.max_query * padded) + 6 * ub_ints(padded);
  const int64_t state = slots + slots / 8 + align_up(shape.sets, kUbBlockBytes) + kScanSlots;
  const int64_t kinds = shape.compact ? 11 * kLookUpIds * 4 + 2 * kLookUpIds / 8 + kSelectBytes : 0;
  return requests + positions + state + kinds + align_up(padded / 8, kUbBlockBytes) +
         (int64_t{2} << id_table_bits) + (parts + 1) * kRecordInts * 4 + (kMaxQueryTokens + 1) * kUbBlockBytes;
}

inline void check_plan_shape(Checker& check, const PlanShape& shape, int64_t cores) {
  check.between("cores", cores, 1, kMaxCores);
  check.between("requests", shape.requests, 0, kInt32Max);
  check.between("tokens", shape.tokens, 0, kInt32Max);
  check.between("query tokens per request", shape.max_query, 1, kMaxQueryTokens);
  check.between("top-k width", shape.width, 16, 8192);
  check.multiple("top-k width", shape.width, 16);
  check.require(shape.ways == 16 || shape.ways == 32,
                "ways: must be 16 or 32, got " + std::to_string(shape.ways));
  check.require(is_power_of_two(shape.sets), "sets: must be a power of two, got " + std::to_string(shape.sets));
  check.require(shape.sets >= kMinPartSets,
                "sets: the kernel needs at least " + std::to_string(kMinPartSets) + " per partition, got " +
                    std::to_string(shape.sets) + "; use a topk_buffer_size of at least " +
                    std::to_string(kMinPartSets * shape.ways));
  check.between("policy", shape.policy, 0, kPolicyCount - 1);
  check_pool(check, shape.rows, shape.sets * shape.ways);
  check.require(shape.sets * shape.ways <= 32768,
                "slots per partition: must be at most 32768, got " + std::to_string(shape.sets * shape.ways));
  check.require(shape.max_query * shape.width <= shape.sets * shape.ways,
                "top-k: " + std::to_string(shape.max_query) + " query tokens of " + std::to_string(shape.width) +
                    " ids do not fit a partition of " + std::to_string(shape.sets * shape.ways) + " slots");
  check.require(shape.miss_capacity >= shape.max_query * shape.width,
                "miss capacity: " + std::to_string(shape.miss_capacity) + " is less than the " +
                    std::to_string(shape.max_query * shape.width) + " ids of a request");
  check.multiple("miss capacity", shape.miss_capacity, 16);
}

// As many parts as there are cores for, and at least as many as fit the unified buffer.
inline int64_t choose_parts(const PlanShape& shape, int64_t padded, int64_t cores) {
  int64_t parts = 1;
  const auto can_double = [&] { return shape.sets / (2 * parts) >= kMinPartSets; };
  while (can_double() && shape.requests * parts * 2 <= cores) parts *= 2;
  while (can_double() && plan_sets_bytes(shape, padded, shape.sets / parts) > kUbBytes) parts *= 2;
  return parts;
}

inline void lay_out_workspace(PlanTiling& data) {
  const int64_t requests = data.requests;
  data.values_offset = 0;
  data.records_offset = data.values_offset + requests * data.parts * data.max_query * data.width * 4;
  data.totals_offset = data.records_offset + requests * data.parts * kRecordInts * 4;
  data.states_offset = data.totals_offset + requests * kRecordInts * 4;
  data.empties_offset = data.states_offset + requests * data.sets * data.ways;
}

// Bytes of global memory that a call needs besides its arguments; begins on a line.
inline int64_t workspace_bytes(const PlanTiling& data) {
  return data.empties_offset + int64_t{data.requests} * data.sets * data.ways / 8;
}

// Of the unified buffer, in the phase that needs most.
inline int64_t plan_ub_bytes(const PlanShape& shape, const PlanTiling& data) {
  const int64_t first = plan_sets_bytes(shape, data.padded_width, data.part_sets);
  const int64_t second = plan_rows_bytes(shape, data.padded_width, data.parts, data.id_table_bits);
  return first > second ? first : second;
}

inline Tiled<PlanTiling> tile_dsa_plan(const PlanShape& shape, int64_t cores) {
  Tiled<PlanTiling> tiled;
  PlanTiling& data = tiled.data;
  Checker check(tiled.refusal);
  check_plan_shape(check, shape, cores);
  if (!tiled.ok()) return tiled;
  const int64_t padded = align_up(shape.width, kLookUpIds);
  const int64_t parts = choose_parts(shape, padded, cores);
  data.cores = static_cast<int32_t>(cores);
  data.requests = static_cast<int32_t>(shape.requests);
  data.tokens = static_cast<int32_t>(shape.tokens);
  data.width = static_cast<int32_t>(shape.width);
  data.padded_width = static_cast<int32_t>(padded);
  data.max_query = static_cast<int32_t>(shape.max_query);
  data.rows = static_cast<int32_t>(shape.rows);
  data.sets = static_cast<int32_t>(shape.sets);
  data.ways = static_cast<int32_t>(shape.ways);
  data.way_bits = log2_of(shape.ways);
  data.policy = static_cast<int32_t>(shape.policy);
  data.parts = static_cast<int32_t>(parts);
  data.part_sets = static_cast<int32_t>(shape.sets / parts);
  data.part_set_bits = log2_of(data.part_sets);
  data.list_entries = static_cast<int32_t>(padded > kScanSlots ? padded : kScanSlots);
  data.id_table_bits = log2_of(2 * shape.max_query * shape.width);
  data.miss_capacity = static_cast<int32_t>(shape.miss_capacity);
  data.compact = shape.compact ? 1 : 0;
  lay_out_workspace(data);
  const int64_t needed = plan_ub_bytes(shape, data);
  check.require(needed <= kUbBytes, "unified buffer: the plan needs " + std::to_string(needed) + " of " +
                                        std::to_string(kUbBytes) + " bytes; use fewer requests per call, a smaller "
                                        "top-k or fewer slots per partition");
  return tiled;
}

}  // namespace kvoffload::ascendc
