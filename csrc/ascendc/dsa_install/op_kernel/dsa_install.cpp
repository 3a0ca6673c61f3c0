// dsa_install: after attention on a compact selection, the rows that were misses go from the selection to their slots
// of the hot pool. The slots of one request's misses are distinct, as a plan's are. Global memory:
//   selection0, selection1   [T, K, bytes] by component
//   hot0, hot1               [R, P, bytes], written
//   query_start_loc [N+1], rows [N], miss_positions [N, M], miss_slots [N, M], miss_counts [N]      int32
//   reports                  int64 [cores, 8], written: bytes moved, rows refused
#include "kernel_operator.h"

#include "../../common/core_report.h"
#include "../../common/miss_share.h"
#include "../../common/row_mover.h"
#include "dsa_install_tiling_data.h"

namespace kvoffload::ascendc {

struct InstallArguments {
  GM_ADDR selection[kComponents];
  GM_ADDR hot[kComponents];
  GM_ADDR query_start_loc;
  GM_ADDR rows;
  GM_ADDR miss_positions;
  GM_ADDR miss_slots;
  GM_ADDR miss_counts;
  GM_ADDR reports;
};

class Install {
 public:
  __aicore__ inline void init(const InstallArguments& args, const InstallTiling& tiling) {
    tiling_ = tiling;
    mover_.init(pipe_, tiling.rows, kListEntries);
    mover_.source(0).init(args.selection[0], args.selection[1]);
    mover_.destination().init(args.hot[0], args.hot[1]);
    rows_.init(pipe_, args.rows, tiling.requests);
    counts_.init(pipe_, args.miss_counts, tiling.requests);
    starts_.init(pipe_, args.query_start_loc, tiling.requests + 1);
    positions_.init(pipe_, args.miss_positions, kListEntries);
    slots_.init(pipe_, args.miss_slots, kListEntries);
    report_.init(pipe_, args.reports);
    rows_.fetch(0, tiling.requests);
    counts_.fetch(0, tiling.requests);
    starts_.fetch(0, tiling.requests + 1);
    KVOFFLOAD_ORDER(MTE2_S);
  }

  __aicore__ inline void run() {
    MissShare share(rows_, counts_, tiling_.requests, tiling_.miss_capacity, tiling_.by_request != 0);
    for (int32_t n = 0; n < tiling_.requests; ++n) {
      int32_t first = 0;
      int32_t last = 0;
      share.next(n, first, last);
      for (; first < last; first += kListEntries) {
        install(n, first, last - first < kListEntries ? last - first : kListEntries);
      }
    }
    report_.write(moved_ * (tiling_.rows.bytes[0] + tiling_.rows.bytes[1]), refused_);
  }

 private:
  // Misses first, first + 1, ... of request n.
  __aicore__ inline void install(int32_t n, int32_t first, int32_t count) {
    KVOFFLOAD_ORDER(S_MTE2);  // the windows' last misses
    const uint64_t offset = static_cast<uint64_t>(n) * tiling_.miss_capacity + first;
    positions_.fetch(offset, count);
    slots_.fetch(offset, count);
    KVOFFLOAD_ORDER(MTE2_S);
    const int32_t selected = (starts_[n + 1] - starts_[n]) * tiling_.width;
    int32_t entries = 0;
    for (int32_t i = 0; i < count; ++i) {
      const bool valid = rows_[n] < tiling_.hot_rows && slots_[i] >= 0 && slots_[i] < tiling_.slots &&
                         positions_[i] >= 0 && positions_[i] < selected;
      if (!valid) {
        ++refused_;
        continue;
      }
      mover_.set(entries++, 0, starts_[n] * tiling_.width + positions_[i], rows_[n] * tiling_.slots + slots_[i]);
    }
    mover_.move(entries);
    moved_ += entries;
  }

  AscendC::TPipe pipe_;
  RowMover<1> mover_;
  StagedInts rows_;
  StagedInts counts_;
  StagedInts starts_;
  StagedInts positions_;
  StagedInts slots_;
  CoreReport report_;
  InstallTiling tiling_;
  int64_t moved_ = 0;
  int64_t refused_ = 0;
};

}  // namespace kvoffload::ascendc

extern "C" __global__ __aicore__ void kvoffload_dsa_install(GM_ADDR selection0, GM_ADDR selection1, GM_ADDR hot0,
                                                            GM_ADDR hot1, GM_ADDR query_start_loc, GM_ADDR rows,
                                                            GM_ADDR miss_positions, GM_ADDR miss_slots,
                                                            GM_ADDR miss_counts, GM_ADDR reports,
                                                            kvoffload::ascendc::InstallTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  kvoffload::ascendc::Install install;
  install.init({{selection0, selection1}, {hot0, hot1}, query_start_loc, rows, miss_positions, miss_slots,
                miss_counts, reports},
               tiling);
  install.run();
}
