// torch.ops.kvoffload.* on the NPU. dsa_plan is the device's implementation of the operator that
// vllm_kvoffload.ops.torch_ops declares. The operators that move rows are declared here: rows have components on this
// device, and host rows are addresses. They return their cores' reports (int64 [cores, 8]: bytes fetched, rows refused)
// instead of a sum, so that no call waits for the device.
#include <ATen/ATen.h>
#include <acl/acl.h>
#include <c10/core/DeviceGuard.h>
#include <tiling/platform/platform_ascendc.h>
#include <torch/library.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>
#include <torch_npu/csrc/framework/OpCommand.h>

#include "../../policies/names.h"
#include "../dsa_install/op_host/dsa_install_launch.h"
#include "../dsa_install/op_host/dsa_install_tiling.h"
#include "../dsa_plan/op_host/dsa_plan_launch.h"
#include "../dsa_plan/op_host/dsa_plan_tiling.h"
#include "../dsa_serve/op_host/dsa_serve_launch.h"
#include "../dsa_serve/op_host/dsa_serve_tiling.h"
#include "../dsa_serve_compact/op_host/dsa_serve_compact_launch.h"
#include "../dsa_serve_compact/op_host/dsa_serve_compact_tiling.h"
#include "../gather_selection/op_host/gather_selection_launch.h"
#include "../gather_selection/op_host/gather_selection_tiling.h"
#include "../host_write/op_host/host_write_launch.h"
#include "../host_write/op_host/host_write_tiling.h"
#include "tensors.h"

namespace kvoffload::ascendc {
namespace {

using at::kByte;
using at::kInt;
using at::kLong;
using at::Tensor;

int64_t vector_cores() {
  static const int64_t cores = platform_ascendc::PlatformAscendCManager::GetInstance()->GetCoreNumAiv();
  return cores < kMaxCores ? cores : kMaxCores;
}

template <typename Data>
const Data& accepted(const char* op, const Tiled<Data>& tiled) {
  TORCH_CHECK_VALUE(tiled.ok(), op, ": ", tiled.refusal);
  return tiled.data;
}

// In the order of torch_npu's task queue. Values that the launch captures live until the queue runs it.
template <typename Launch>
void enqueue(const char* name, Launch launch) {
  void* stream = c10_npu::getCurrentNPUStream().stream(false);
  at_npu::native::OpCommand::RunOpApi(name, [=]() -> int {
    launch(stream);
    return 0;
  });
}

Tensor new_reports(const Tensor& like) {
  return at::empty({vector_cores(), kReportInts}, like.options().dtype(kLong));
}

int64_t policy_of(c10::string_view policy) {
  const std::optional<Policy> known = policy_named({policy.data(), policy.size()});
  TORCH_CHECK_VALUE(known.has_value(), "policy: must be one of ", policy_names(), ", got ", policy);
  return static_cast<int64_t>(*known);
}

void check_requests(const Tensor& query_start_loc, const Tensor& rows) {
  check_tensor("rows", rows, kInt, {-1});
  check_tensor("query_start_loc", query_start_loc, kInt, {rows.size(0) + 1});
}

void check_state(const Tensor& tags, const Tensor& ages, const Tensor& hands, const Tensor& high) {
  check_tensor("tags", tags, kInt, {-1, -1, -1});
  check_tensor("ages", ages, kByte, tags.sizes());
  check_tensor("hands", hands, kByte, {tags.size(0), tags.size(1)});
  check_tensor("high", high, kInt, {tags.size(0)});
}

void dsa_plan(const Tensor& topk, const Tensor& query_start_loc, const Tensor& seq_lens, const Tensor& rows,
              const Tensor& tags, const Tensor& ages, const Tensor& hands, const Tensor& high,
              c10::string_view policy, const Tensor& slots, const Tensor& new_slots, const Tensor& miss_ids,
              const Tensor& miss_slots, const Tensor& miss_counts, const Tensor& stats, const Tensor& kinds,
              const Tensor& miss_positions) {
  const c10::OptionalDeviceGuard guard(topk.device());
  check_requests(query_start_loc, rows);
  check_tensor("seq_lens", seq_lens, kInt, {rows.size(0)});
  check_state(tags, ages, hands, high);
  check_tensor("topk", topk, kInt, {-1, -1});
  const int64_t tokens = topk.size(0);
  const int64_t width = topk.size(1);
  check_tensor("slots", slots, kInt, {-1, width});
  check_tensor("new_slots", new_slots, kInt, {slots.size(0)});
  check_tensor("miss_ids", miss_ids, kInt, {-1, -1});
  check_tensor("miss_slots", miss_slots, kInt, miss_ids.sizes());
  check_tensor("miss_counts", miss_counts, kInt, {miss_ids.size(0)});
  check_tensor("stats", stats, kLong, {6});
  TORCH_CHECK_VALUE(tokens <= slots.size(0) && rows.size(0) <= miss_ids.size(0), "topk: ", tokens, " tokens of ",
                    rows.size(0), " requests exceed the output buffers");
  const bool compact = kinds.numel() != 0;
  if (compact) {
    check_tensor("kinds", kinds, kInt, {slots.size(0), width, 2});
    check_tensor("miss_positions", miss_positions, kInt, miss_ids.sizes());
  }
  const PlanShape shape{rows.size(0),  tokens,       width,        miss_ids.size(1) / width, tags.size(0),
                        tags.size(1), tags.size(2), policy_of(policy), miss_ids.size(1),     compact};
  const Tiled<PlanTiling> tiled = tile_dsa_plan(shape, vector_cores());
  const PlanTiling& tiling = accepted("dsa_plan", tiled);
  const Tensor workspace = at::empty({workspace_bytes(tiling)}, topk.options().dtype(kByte));
  const PlanPointers pointers{address(topk),      address(query_start_loc), address(seq_lens),
                              address(rows),      address(tags),            address(ages),
                              address(hands),     address(high),            address(slots),
                              address(new_slots), address(miss_ids),        address(miss_slots),
                              address(miss_counts), address(stats),         compact ? address(kinds) : nullptr,
                              compact ? address(miss_positions) : nullptr,  address(workspace)};
  enqueue("kvoffload_dsa_plan",
          [tiling, pointers, workspace](void* stream) { launch_dsa_plan(stream, tiling, pointers); });
}

Tensor dsa_serve_rows(at::IntArrayRef host, int64_t host_blocks, int64_t block_size, at::TensorList hot,
                      at::TensorList new_rows, const Tensor& block_table, const Tensor& query_start_loc,
                      const Tensor& rows, const Tensor& miss_ids, const Tensor& miss_slots,
                      const Tensor& miss_counts, const Tensor& new_slots) {
  const c10::OptionalDeviceGuard guard(rows.device());
  check_requests(query_start_loc, rows);
  const Components pool = components_of("hot", hot, {-1, -1});
  const Components fresh = components_of("new_rows", new_rows, {-1});
  check_same_rows("new_rows", fresh, pool);
  const Components source = host_components(host, pool);
  check_tensor("block_table", block_table, kInt, {rows.size(0), -1});
  check_tensor("miss_ids", miss_ids, kInt, {-1, -1});
  check_tensor("miss_slots", miss_slots, kInt, miss_ids.sizes());
  check_tensor("miss_counts", miss_counts, kInt, {miss_ids.size(0)});
  check_tensor("new_slots", new_slots, kInt, {-1});
  TORCH_CHECK_VALUE(rows.size(0) <= miss_ids.size(0), "rows: more requests than miss_ids");
  TORCH_CHECK_VALUE(new_rows[0].size(0) <= new_slots.size(0), "new_rows: more tokens than new_slots");
  const ServeShape shape{rows.size(0), new_rows[0].size(0), hot[0].size(0), hot[0].size(1), miss_ids.size(1),
                         host_blocks,  block_size,          block_table.size(1),
                         {pool.row_bytes[0], pool.row_bytes[1]}};
  const Tiled<ServeTiling> tiled = tile_dsa_serve(shape, vector_cores());
  const ServeTiling& tiling = accepted("dsa_serve_rows", tiled);
  const Tensor reports = new_reports(rows);
  const ServePointers pointers{{source.data[0], source.data[1]},
                               {pool.data[0], pool.data[1]},
                               {fresh.data[0], fresh.data[1]},
                               address(block_table),
                               address(query_start_loc),
                               address(rows),
                               address(miss_ids),
                               address(miss_slots),
                               address(miss_counts),
                               address(new_slots),
                               address(reports)};
  enqueue("kvoffload_dsa_serve",
          [tiling, pointers, reports](void* stream) { launch_dsa_serve(stream, tiling, pointers); });
  return reports;
}

Tensor dsa_serve_compact_rows(at::IntArrayRef host, int64_t host_blocks, int64_t block_size, at::TensorList hot,
                              at::TensorList new_rows, at::TensorList selection, const Tensor& kinds,
                              const Tensor& query_start_loc, const Tensor& seq_lens, const Tensor& block_table,
                              const Tensor& rows) {
  const c10::OptionalDeviceGuard guard(rows.device());
  check_requests(query_start_loc, rows);
  check_tensor("seq_lens", seq_lens, kInt, {rows.size(0)});
  check_tensor("kinds", kinds, kInt, {-1, -1, 2});
  const Components pool = components_of("hot", hot, {-1, -1});
  const Components fresh = components_of("new_rows", new_rows, {-1});
  const Components selected = components_of("selection", selection, {-1, kinds.size(1)});
  check_same_rows("new_rows", fresh, pool);
  check_same_rows("selection", selected, pool);
  const Components source = host_components(host, pool);
  check_tensor("block_table", block_table, kInt, {rows.size(0), -1});
  const int64_t tokens = new_rows[0].size(0);
  TORCH_CHECK_VALUE(tokens <= kinds.size(0) && tokens <= selection[0].size(0),
                    "new_rows: more tokens than kinds or selection");
  if (tokens == 0) return new_reports(rows).zero_();
  const ServeCompactShape shape{rows.size(0), tokens,     kinds.size(1),       hot[0].size(0), hot[0].size(1),
                                host_blocks,  block_size, block_table.size(1), {pool.row_bytes[0], pool.row_bytes[1]}};
  const Tiled<ServeCompactTiling> tiled = tile_dsa_serve_compact(shape, vector_cores());
  const ServeCompactTiling& tiling = accepted("dsa_serve_compact_rows", tiled);
  const Tensor reports = new_reports(rows);
  const ServeCompactPointers pointers{{source.data[0], source.data[1]},
                                      {pool.data[0], pool.data[1]},
                                      {fresh.data[0], fresh.data[1]},
                                      {selected.data[0], selected.data[1]},
                                      address(kinds),
                                      address(query_start_loc),
                                      address(seq_lens),
                                      address(block_table),
                                      address(rows),
                                      address(reports)};
  enqueue("kvoffload_dsa_serve_compact",
          [tiling, pointers, reports](void* stream) { launch_dsa_serve_compact(stream, tiling, pointers); });
  return reports;
}

Tensor dsa_install_rows(at::TensorList selection, at::TensorList hot, const Tensor& query_start_loc,
                        const Tensor& rows, const Tensor& miss_positions, const Tensor& miss_slots,
                        const Tensor& miss_counts) {
  const c10::OptionalDeviceGuard guard(rows.device());
  check_requests(query_start_loc, rows);
  const Components selected = components_of("selection", selection, {-1, -1});
  const Components pool = components_of("hot", hot, {-1, -1});
  check_same_rows("selection", selected, pool);
  check_tensor("miss_positions", miss_positions, kInt, {-1, -1});
  check_tensor("miss_slots", miss_slots, kInt, miss_positions.sizes());
  check_tensor("miss_counts", miss_counts, kInt, {miss_positions.size(0)});
  TORCH_CHECK_VALUE(rows.size(0) <= miss_positions.size(0), "rows: more requests than miss_positions");
  if (selection[0].size(0) == 0) return new_reports(rows).zero_();
  const InstallShape shape{rows.size(0),   selection[0].size(0),   selection[0].size(1),
                           hot[0].size(0), hot[0].size(1),         miss_positions.size(1),
                           {pool.row_bytes[0], pool.row_bytes[1]}};
  const Tiled<InstallTiling> tiled = tile_dsa_install(shape, vector_cores());
  const InstallTiling& tiling = accepted("dsa_install_rows", tiled);
  const Tensor reports = new_reports(rows);
  const InstallPointers pointers{{selected.data[0], selected.data[1]},
                                 {pool.data[0], pool.data[1]},
                                 address(query_start_loc),
                                 address(rows),
                                 address(miss_positions),
                                 address(miss_slots),
                                 address(miss_counts),
                                 address(reports)};
  enqueue("kvoffload_dsa_install",
          [tiling, pointers, reports](void* stream) { launch_dsa_install(stream, tiling, pointers); });
  return reports;
}

// The first K + 1 columns of a tensor whose pitch is whole lines.
void check_status(const Tensor& status, int64_t columns) {
  TORCH_CHECK_VALUE(status.device().type() == c10::DeviceType::PrivateUse1 && status.scalar_type() == kInt &&
                        status.dim() == 3 && status.size(2) == columns && status.stride(2) == 1 &&
                        status.stride(0) == status.size(1) * status.stride(1),
                    "status: expected int32 [R, Q, ", columns, "] on the NPU, a view of [R, Q, pitch]");
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(status.data_ptr()) % kLineBytes == 0,
                    "status: must begin on a line of ", kLineBytes, " bytes");
}

Tensor gather_selection_rows(at::IntArrayRef host, int64_t host_blocks, int64_t block_size,
                             at::TensorList new_rows, at::TensorList selection, const Tensor& status,
                             const Tensor& topk, const Tensor& query_start_loc, const Tensor& seq_lens,
                             const Tensor& rows, const Tensor& block_table, const Tensor& lengths) {
  const c10::OptionalDeviceGuard guard(rows.device());
  check_requests(query_start_loc, rows);
  check_tensor("seq_lens", seq_lens, kInt, {rows.size(0)});
  check_tensor("topk", topk, kInt, {-1, -1});
  check_status(status, topk.size(1) + 1);
  const Components kept = components_of("selection", selection, {status.size(0), status.size(1), topk.size(1)});
  const Components fresh = components_of("new_rows", new_rows, {-1});
  check_same_rows("new_rows", fresh, kept);
  const Components source = host_components(host, kept);
  check_tensor("block_table", block_table, kInt, {rows.size(0), -1});
  check_tensor("lengths", lengths, kInt, {topk.size(0)});
  if (topk.size(0) == 0) return new_reports(rows).zero_();
  const GatherShape shape{rows.size(0),   topk.size(0),     topk.size(1), status.size(1),
                          status.size(0), status.stride(1), host_blocks,  block_size,
                          block_table.size(1), {kept.row_bytes[0], kept.row_bytes[1]}};
  const Tiled<GatherTiling> tiled = tile_gather_selection(shape, vector_cores());
  const GatherTiling& tiling = accepted("gather_selection_rows", tiled);
  const Tensor reports = new_reports(rows);
  const GatherPointers pointers{{source.data[0], source.data[1]},
                                {fresh.data[0], fresh.data[1]},
                                {kept.data[0], kept.data[1]},
                                address(status),
                                address(topk),
                                address(query_start_loc),
                                address(seq_lens),
                                address(rows),
                                address(block_table),
                                address(lengths),
                                address(reports)};
  enqueue("kvoffload_gather_selection",
          [tiling, pointers, reports](void* stream) { launch_gather_selection(stream, tiling, pointers); });
  return reports;
}

Tensor host_write_rows(at::IntArrayRef host, int64_t host_blocks, int64_t block_size, at::TensorList new_rows,
                       const Tensor& slot_mapping) {
  const c10::OptionalDeviceGuard guard(slot_mapping.device());
  const Components fresh = components_of("new_rows", new_rows, {-1});
  const Components target = host_components(host, fresh);
  const int64_t tokens = new_rows[0].size(0);
  check_tensor("slot_mapping", slot_mapping, kInt, {tokens});
  if (tokens == 0) return new_reports(slot_mapping).zero_();
  const HostWriteShape shape{tokens, host_blocks, block_size, {fresh.row_bytes[0], fresh.row_bytes[1]}};
  const Tiled<HostWriteTiling> tiled = tile_host_write(shape, vector_cores());
  const HostWriteTiling& tiling = accepted("host_write_rows", tiled);
  const Tensor reports = new_reports(slot_mapping);
  const HostWritePointers pointers{{target.data[0], target.data[1]},
                                   {fresh.data[0], fresh.data[1]},
                                   address(slot_mapping),
                                   address(reports)};
  enqueue("kvoffload_host_write",
          [tiling, pointers, reports](void* stream) { launch_host_write(stream, tiling, pointers); });
  return reports;
}

// Maps host memory (whole pages) for the device; returns the address kernels reach it at.
int64_t host_register(int64_t data, int64_t bytes) {
  void* mapped = nullptr;
  const aclError error = aclrtHostRegister(reinterpret_cast<void*>(static_cast<uintptr_t>(data)),
                                           static_cast<uint64_t>(bytes), ACL_HOST_REGISTER_MAPPED, &mapped);
  TORCH_CHECK(error == ACL_SUCCESS, "host_register: mapping ", bytes, " bytes failed with error ", error);
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(mapped));
}

void host_unregister(int64_t data) {
  const aclError error = aclrtHostUnregister(reinterpret_cast<void*>(static_cast<uintptr_t>(data)));
  TORCH_CHECK(error == ACL_SUCCESS, "host_unregister: failed with error ", error);
}

// On tensors without data: nothing is written, and the reports have their shape.
template <typename... Arguments>
auto fake_of(Tensor (*)(Arguments...)) {
  return +[](Arguments...) -> Tensor {
    return at::empty({vector_cores(), kReportInts}, at::TensorOptions(kLong).device(at::kMeta));
  };
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(kvoffload, m) {
  m.def("dsa_serve_rows(int[] host, int host_blocks, int block_size, Tensor(a!)[] hot, Tensor[] new_rows, "
        "Tensor block_table, Tensor query_start_loc, Tensor rows, Tensor miss_ids, Tensor miss_slots, "
        "Tensor miss_counts, Tensor new_slots) -> Tensor");
  m.def("dsa_serve_compact_rows(int[] host, int host_blocks, int block_size, Tensor[] hot, Tensor[] new_rows, "
        "Tensor(a!)[] selection, Tensor kinds, Tensor query_start_loc, Tensor seq_lens, Tensor block_table, "
        "Tensor rows) -> Tensor");
  m.def("dsa_install_rows(Tensor[] selection, Tensor(a!)[] hot, Tensor query_start_loc, Tensor rows, "
        "Tensor miss_positions, Tensor miss_slots, Tensor miss_counts) -> Tensor");
  m.def("gather_selection_rows(int[] host, int host_blocks, int block_size, Tensor[] new_rows, "
        "Tensor(a!)[] selection, Tensor(b!) status, Tensor topk, Tensor query_start_loc, Tensor seq_lens, "
        "Tensor rows, Tensor block_table, Tensor(c!) lengths) -> Tensor");
  m.def("host_write_rows(int[] host, int host_blocks, int block_size, Tensor[] new_rows, Tensor slot_mapping) "
        "-> Tensor");
  m.def("host_register(int data, int bytes) -> int", &host_register);
  m.def("host_unregister(int data) -> ()", &host_unregister);
}

TORCH_LIBRARY_IMPL(kvoffload, PrivateUse1, m) {
  m.impl("dsa_plan", &dsa_plan);
  m.impl("dsa_serve_rows", &dsa_serve_rows);
  m.impl("dsa_serve_compact_rows", &dsa_serve_compact_rows);
  m.impl("dsa_install_rows", &dsa_install_rows);
  m.impl("host_write_rows", &host_write_rows);
  m.impl("gather_selection_rows", &gather_selection_rows);
}

TORCH_LIBRARY_IMPL(kvoffload, Meta, m) {
  m.impl("dsa_serve_rows", fake_of(&dsa_serve_rows));
  m.impl("dsa_serve_compact_rows", fake_of(&dsa_serve_compact_rows));
  m.impl("dsa_install_rows", fake_of(&dsa_install_rows));
  m.impl("host_write_rows", fake_of(&host_write_rows));
  m.impl("gather_selection_rows", fake_of(&gather_selection_rows));
}

}  // namespace kvoffload::ascendc
