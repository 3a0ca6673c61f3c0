// The kernels' entry points and tilings, as a host sees them.
#pragma once

#include <cstdint>

#include "../../csrc/ascendc/dsa_install/op_host/dsa_install_tiling.h"
#include "../../csrc/ascendc/dsa_plan/op_host/dsa_plan_tiling.h"
#include "../../csrc/ascendc/dsa_serve/op_host/dsa_serve_tiling.h"
#include "../../csrc/ascendc/dsa_serve_compact/op_host/dsa_serve_compact_tiling.h"
#include "../../csrc/ascendc/gather_selection/op_host/gather_selection_tiling.h"
#include "../../csrc/ascendc/host_write/op_host/host_write_tiling.h"

extern "C" {
void kvoffload_dsa_serve(uint8_t* host0, uint8_t* host1, uint8_t* hot0, uint8_t* hot1, uint8_t* new_rows0,
                         uint8_t* new_rows1, uint8_t* block_table, uint8_t* query_start_loc, uint8_t* rows,
                         uint8_t* miss_ids, uint8_t* miss_slots, uint8_t* miss_counts, uint8_t* new_slots,
                         uint8_t* reports, kvoffload::ascendc::ServeTiling tiling);
void kvoffload_dsa_serve_compact(uint8_t* host0, uint8_t* host1, uint8_t* hot0, uint8_t* hot1, uint8_t* new_rows0,
                                 uint8_t* new_rows1, uint8_t* selection0, uint8_t* selection1, uint8_t* kinds,
                                 uint8_t* query_start_loc, uint8_t* seq_lens, uint8_t* block_table, uint8_t* rows,
                                 uint8_t* reports, kvoffload::ascendc::ServeCompactTiling tiling);
void kvoffload_dsa_install(uint8_t* selection0, uint8_t* selection1, uint8_t* hot0, uint8_t* hot1,
                           uint8_t* query_start_loc, uint8_t* rows, uint8_t* miss_positions, uint8_t* miss_slots,
                           uint8_t* miss_counts, uint8_t* reports, kvoffload::ascendc::InstallTiling tiling);
void kvoffload_gather_selection(uint8_t* host0, uint8_t* host1, uint8_t* new_rows0, uint8_t* new_rows1,
                                uint8_t* selection0, uint8_t* selection1, uint8_t* status, uint8_t* topk,
                                uint8_t* query_start_loc, uint8_t* seq_lens, uint8_t* rows, uint8_t* block_table,
                                uint8_t* lengths, uint8_t* reports, kvoffload::ascendc::GatherTiling tiling);
void kvoffload_host_write(uint8_t* host0, uint8_t* host1, uint8_t* new_rows0, uint8_t* new_rows1,
                          uint8_t* slot_mapping, uint8_t* reports, kvoffload::ascendc::HostWriteTiling tiling);
void kvoffload_dsa_plan(uint8_t* topk, uint8_t* query_start_loc, uint8_t* seq_lens, uint8_t* rows, uint8_t* tags,
                        uint8_t* ages, uint8_t* hands, uint8_t* high, uint8_t* slots, uint8_t* new_slots,
                        uint8_t* miss_ids, uint8_t* miss_slots, uint8_t* miss_counts, uint8_t* stats, uint8_t* kinds,
                        uint8_t* miss_positions, uint8_t* workspace, kvoffload::ascendc::PlanTiling tiling);
}
