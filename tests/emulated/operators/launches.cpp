// What csrc/ascendc/torch launches, on the emulated NPU: each launch is a task of the stream that runs the AscendC
// kernel itself on the CPU twin of a vector core. A finding of the twin fails the task, and so the next wait for the
// device. The twin checks every access against the memory that a launch registers here, by the sizes of its tiling.
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "../../../csrc/ascendc/dsa_install/op_host/dsa_install_launch.h"
#include "../../../csrc/ascendc/dsa_plan/op_host/dsa_plan_launch.h"
#include "../../../csrc/ascendc/dsa_plan/op_host/dsa_plan_tiling.h"
#include "../../../csrc/ascendc/dsa_serve/op_host/dsa_serve_launch.h"
#include "../../../csrc/ascendc/dsa_serve_compact/op_host/dsa_serve_compact_launch.h"
#include "../../../csrc/ascendc/gather_selection/op_host/gather_selection_launch.h"
#include "../../../csrc/ascendc/host_write/op_host/host_write_launch.h"
#include "../../ascendc/entries.h"
#include "acpu.h"
#include "arena.h"
#include "stream.h"
#include "tiling/platform/platform_ascendc.h"

namespace {

constexpr int64_t kInt = 4, kLong = 8;
constexpr uint32_t kVectorCores = 5;

std::mutex one_kernel;  // the twin has one machine at a time

// One launch: names its memory, then runs.
class Kernel {
 public:
  Kernel(std::string name, int cores) : name_(std::move(name)), launch_(options(cores)) {}

  uint8_t* in(const void* data, int64_t bytes, const char* name) { return add(data, bytes, acpu::RegionUse::kIn, name); }
  uint8_t* in_out(const void* data, int64_t bytes, const char* name) {
    return add(data, bytes, acpu::RegionUse::kInOut, name);
  }
  uint8_t* out(const void* data, int64_t bytes, const char* name) {
    return add(data, bytes, acpu::RegionUse::kOut, name);
  }

  template <typename Call>
  void run(Call call) {
    const std::lock_guard<std::mutex> hold(one_kernel);
    const acpu::Result result = launch_.run(call);
    if (!result.reports.empty()) throw std::runtime_error(name_ + ": " + result.text());
  }

 private:
  static acpu::Options options(int cores) {
    acpu::Options chosen;
    chosen.cores = cores;
    chosen.schedule = acpu::Schedule::kLazy;
    return chosen;
  }

  uint8_t* add(const void* data, int64_t bytes, acpu::RegionUse use, const char* name) {
    if (data == nullptr || bytes == 0) return nullptr;
    auto* view = static_cast<uint8_t*>(npu::host_view(data));
    launch_.region(view, static_cast<size_t>(bytes), use, name);
    return view;
  }

  std::string name_;
  acpu::Launch launch_;
};

void submit(void* stream, npu::Task task) { static_cast<npu::Stream*>(stream)->submit(std::move(task)); }

int64_t report_bytes(int64_t cores) { return cores * kvoffload::ascendc::kReportInts * kLong; }

}  // namespace

namespace kvoffload::ascendc {

void launch_dsa_plan(void* stream, const PlanTiling& t, const PlanPointers& p) {
  submit(stream, [t, p] {
    Kernel k("dsa_plan", t.cores);
    const int64_t slots = int64_t{t.sets} * t.ways, chosen = int64_t{t.tokens} * t.width * kInt;
    const int64_t misses = int64_t{t.requests} * t.miss_capacity * kInt;
    uint8_t* a[] = {
        k.in(p.topk, chosen, "topk"),
        k.in(p.query_start_loc, (t.requests + 1) * kInt, "query_start_loc"),
        k.in(p.seq_lens, t.requests * kInt, "seq_lens"),
        k.in(p.rows, t.requests * kInt, "rows"),
        k.in_out(p.tags, t.rows * slots * kInt, "tags"),
        k.in_out(p.ages, t.rows * slots, "ages"),
        k.in_out(p.hands, int64_t{t.rows} * t.sets, "hands"),
        k.in_out(p.high, t.rows * kInt, "high"),
        k.in_out(p.slots, chosen, "slots"),
        k.in_out(p.new_slots, t.tokens * kInt, "new_slots"),
        k.in_out(p.miss_ids, misses, "miss_ids"),
        k.in_out(p.miss_slots, misses, "miss_slots"),
        k.in_out(p.miss_counts, t.requests * kInt, "miss_counts"),
        k.in_out(p.stats, 6 * kLong, "stats"),
        k.in_out(p.kinds, 2 * chosen, "kinds"),
        k.in_out(p.miss_positions, misses, "miss_positions"),
        k.out(p.workspace, workspace_bytes(t), "workspace"),
    };
    k.run([&] {
      kvoffload_dsa_plan(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14],
                         a[15], a[16], t);
    });
  });
}

void launch_dsa_serve(void* stream, const ServeTiling& t, const ServePointers& p) {
  submit(stream, [t, p] {
    Kernel k("dsa_serve", t.cores);
    const int64_t host = int64_t{t.host.blocks} * t.host.block_size, hot = int64_t{t.hot_rows} * t.slots;
    const int64_t misses = int64_t{t.requests} * t.miss_capacity * kInt;
    uint8_t* a[] = {
        k.in(p.host[0], host * t.rows.bytes[0], "host0"),
        k.in(p.host[1], host * t.rows.bytes[1], "host1"),
        k.in_out(p.hot[0], hot * t.rows.bytes[0], "hot0"),
        k.in_out(p.hot[1], hot * t.rows.bytes[1], "hot1"),
        k.in(p.new_rows[0], int64_t{t.tokens} * t.rows.bytes[0], "new_rows0"),
        k.in(p.new_rows[1], int64_t{t.tokens} * t.rows.bytes[1], "new_rows1"),
        k.in(p.block_table, int64_t{t.requests} * t.host.table_width * kInt, "block_table"),
        k.in(p.query_start_loc, (t.requests + 1) * kInt, "query_start_loc"),
        k.in(p.rows, t.requests * kInt, "rows"),
        k.in(p.miss_ids, misses, "miss_ids"),
        k.in(p.miss_slots, misses, "miss_slots"),
        k.in(p.miss_counts, t.requests * kInt, "miss_counts"),
        k.in(p.new_slots, t.tokens * kInt, "new_slots"),
        k.out(p.reports, report_bytes(kVectorCores), "reports"),
    };
    k.run([&] {
      kvoffload_dsa_serve(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], t);
    });
  });
}

void launch_dsa_serve_compact(void* stream, const ServeCompactTiling& t, const ServeCompactPointers& p) {
  submit(stream, [t, p] {
    Kernel k("dsa_serve_compact", t.cores);
    const int64_t host = int64_t{t.host.blocks} * t.host.block_size, hot = int64_t{t.hot_rows} * t.slots;
    const int64_t chosen = int64_t{t.tokens} * t.width;
    uint8_t* a[] = {
        k.in(p.host[0], host * t.rows.bytes[0], "host0"),
        k.in(p.host[1], host * t.rows.bytes[1], "host1"),
        k.in(p.hot[0], hot * t.rows.bytes[0], "hot0"),
        k.in(p.hot[1], hot * t.rows.bytes[1], "hot1"),
        k.in(p.new_rows[0], int64_t{t.tokens} * t.rows.bytes[0], "new_rows0"),
        k.in(p.new_rows[1], int64_t{t.tokens} * t.rows.bytes[1], "new_rows1"),
        k.in_out(p.selection[0], chosen * t.rows.bytes[0], "selection0"),
        k.in_out(p.selection[1], chosen * t.rows.bytes[1], "selection1"),
        k.in(p.kinds, 2 * chosen * kInt, "kinds"),
        k.in(p.query_start_loc, (t.requests + 1) * kInt, "query_start_loc"),
        k.in(p.seq_lens, t.requests * kInt, "seq_lens"),
        k.in(p.block_table, int64_t{t.requests} * t.host.table_width * kInt, "block_table"),
        k.in(p.rows, t.requests * kInt, "rows"),
        k.out(p.reports, report_bytes(kVectorCores), "reports"),
    };
    k.run([&] {
      kvoffload_dsa_serve_compact(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12],
                                  a[13], t);
    });
  });
}

void launch_dsa_install(void* stream, const InstallTiling& t, const InstallPointers& p) {
  submit(stream, [t, p] {
    Kernel k("dsa_install", t.cores);
    const int64_t hot = int64_t{t.hot_rows} * t.slots, chosen = int64_t{t.tokens} * t.width;
    const int64_t misses = int64_t{t.requests} * t.miss_capacity * kInt;
    uint8_t* a[] = {
        k.in(p.selection[0], chosen * t.rows.bytes[0], "selection0"),
        k.in(p.selection[1], chosen * t.rows.bytes[1], "selection1"),
        k.in_out(p.hot[0], hot * t.rows.bytes[0], "hot0"),
        k.in_out(p.hot[1], hot * t.rows.bytes[1], "hot1"),
        k.in(p.query_start_loc, (t.requests + 1) * kInt, "query_start_loc"),
        k.in(p.rows, t.requests * kInt, "rows"),
        k.in(p.miss_positions, misses, "miss_positions"),
        k.in(p.miss_slots, misses, "miss_slots"),
        k.in(p.miss_counts, t.requests * kInt, "miss_counts"),
        k.out(p.reports, report_bytes(kVectorCores), "reports"),
    };
    k.run([&] { kvoffload_dsa_install(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], t); });
  });
}

void launch_gather_selection(void* stream, const GatherTiling&, const GatherPointers&) {
  submit(stream, [] { throw std::runtime_error("gather_selection: no engine calls it, so it isn't launched here"); });
}

void launch_host_write(void* stream, const HostWriteTiling& t, const HostWritePointers& p) {
  submit(stream, [t, p] {
    Kernel k("host_write", t.cores);
    uint8_t* a[] = {
        k.in_out(p.host[0], int64_t{t.host_rows} * t.rows.bytes[0], "host0"),
        k.in_out(p.host[1], int64_t{t.host_rows} * t.rows.bytes[1], "host1"),
        k.in(p.new_rows[0], int64_t{t.tokens} * t.rows.bytes[0], "new_rows0"),
        k.in(p.new_rows[1], int64_t{t.tokens} * t.rows.bytes[1], "new_rows1"),
        k.in(p.slot_mapping, t.tokens * kInt, "slot_mapping"),
        k.out(p.reports, report_bytes(kVectorCores), "reports"),
    };
    k.run([&] { kvoffload_host_write(a[0], a[1], a[2], a[3], a[4], a[5], t); });
  });
}

}  // namespace kvoffload::ascendc

namespace platform_ascendc {
uint32_t PlatformAscendC::GetCoreNumAiv() const { return kVectorCores; }
PlatformAscendC* PlatformAscendCManager::GetInstance() {
  static PlatformAscendC platform;
  return &platform;
}
}  // namespace platform_ascendc
