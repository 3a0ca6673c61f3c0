#pragma once

#include "../../common/tiling_data.h"

namespace kvoffload::ascendc {

constexpr int32_t kMaxQueryTokens = 4;
constexpr int32_t kLookUpIds = 256;     // ids looked up by one round of vector instructions
constexpr int32_t kScanSlots = 1024;    // slots scanned by one
constexpr int32_t kRecordInts = 16;     // one line
constexpr int32_t kRecordNewSlots = 8;  // first of kMaxQueryTokens ints in a record

// A request's partition is planned in `parts`, each a range of sets.
struct PlanTiling {
  int32_t cores;
  int32_t requests;       // N
  int32_t tokens;         // T
  int32_t width;          // K
  int32_t padded_width;   // K, up to a multiple of kLookUpIds
  int32_t max_query;      // most query tokens of a request
  int32_t rows;           // R
  int32_t sets;           // S
  int32_t ways;           // W
  int32_t way_bits;       // log2 W
  int32_t policy;         // a Policy, see csrc/policies/policies.h
  int32_t parts;          // power of two
  int32_t part_sets;      // S / parts
  int32_t part_set_bits;  // log2 of it
  int32_t list_entries;   // of the list of positions or slots
  int32_t id_table_bits;  // log2 of the entries of the displaced ids' table
  int32_t miss_capacity;  // M
  int32_t compact;        // 1: kinds and miss positions are written
  // Workspace, bytes from its beginning.
  int64_t values_offset;   // int32 [N, parts, max_query, K], see plan_values.h
  int64_t records_offset;  // int32 [N, parts, kRecordInts]
  int64_t totals_offset;   // int32 [N, kRecordInts]
  int64_t states_offset;   // uint8 [N, S, W]
  int64_t empties_offset;  // one bit for each way: uint8 [N, S, W / 8]
};

}  // namespace kvoffload::ascendc
