// host_write: a step's new rows of a layer go to their slots of the host pool. Slots are distinct. Global memory:
//   host0, host1             rows of the host pool by component, at their device-visible address, written
//   new_rows0, new_rows1     [T, bytes]
//   slot_mapping             int32 [T], rows of the host pool, -1 for none
//   reports                  int64 [cores, 8], written: bytes moved, rows refused
#include "kernel_operator.h"

#include "../../common/core_report.h"
#include "../../common/row_mover.h"
#include "../../common/staged_ints.h"
#include "host_write_tiling_data.h"

namespace kvoffload::ascendc {

struct HostWriteArguments {
  GM_ADDR host[kComponents];
  GM_ADDR new_rows[kComponents];
  GM_ADDR slot_mapping;
  GM_ADDR reports;
};

class HostWrite {
 public:
  __aicore__ inline void init(const HostWriteArguments& args, const HostWriteTiling& tiling) {
    tiling_ = tiling;
    mover_.init(pipe_, tiling.rows, kListEntries);
    mover_.source(0).init(args.new_rows[0], args.new_rows[1]);
    mover_.destination().init(args.host[0], args.host[1]);
    slots_.init(pipe_, args.slot_mapping, kListEntries);
    report_.init(pipe_, args.reports);
  }

  // Tokens are dealt out in equal shares, so that runs of slots stay together; where rows share lines, every core looks
  // at all of them for its groups.
  __aicore__ inline void run() {
    const int64_t tokens = tiling_.tokens;
    const int64_t core = AscendC::GetBlockIdx();
    const int64_t cores = AscendC::GetBlockNum();
    int32_t first = static_cast<int32_t>(grouped() ? 0 : tokens * core / cores);
    const int32_t last = static_cast<int32_t>(grouped() ? tokens : tokens * (core + 1) / cores);
    for (; first < last; first += kListEntries) {
      write(first, last - first < kListEntries ? last - first : kListEntries);
    }
    report_.write(moved_ * (tiling_.rows.bytes[0] + tiling_.rows.bytes[1]), refused_);
  }

 private:
  __aicore__ inline bool grouped() const { return tiling_.group > 1; }

  // This core's share of tokens first, first + 1, ...
  __aicore__ inline void write(int32_t first, int32_t count) {
    KVOFFLOAD_ORDER(S_MTE2);  // the window's last slots
    slots_.fetch(first, count);
    KVOFFLOAD_ORDER(MTE2_S);
    int32_t entries = 0;
    for (int32_t i = 0; i < count; ++i) {
      const int32_t slot = slots_[i];
      if (slot == -1) continue;
      const bool valid = slot >= 0 && slot < tiling_.host_rows;
      if (grouped() && !mine(valid ? slot / tiling_.group : first + i)) continue;
      if (!valid) {
        ++refused_;
        continue;
      }
      mover_.set(entries++, 0, first + i, slot);
    }
    mover_.move(entries);
    moved_ += entries;
  }

  __aicore__ inline bool mine(int32_t number) const {
    return number % static_cast<int32_t>(AscendC::GetBlockNum()) == static_cast<int32_t>(AscendC::GetBlockIdx());
  }

  AscendC::TPipe pipe_;
  RowMover<1> mover_;
  StagedInts slots_;
  CoreReport report_;
  HostWriteTiling tiling_;
  int64_t moved_ = 0;
  int64_t refused_ = 0;
};

}  // namespace kvoffload::ascendc

extern "C" __global__ __aicore__ void kvoffload_host_write(GM_ADDR host0, GM_ADDR host1, GM_ADDR new_rows0,
                                                           GM_ADDR new_rows1, GM_ADDR slot_mapping, GM_ADDR reports,
                                                           kvoffload::ascendc::HostWriteTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  kvoffload::ascendc::HostWrite write;
  write.init({{host0, host1}, {new_rows0, new_rows1}, slot_mapping, reports}, tiling);
  write.run();
}
