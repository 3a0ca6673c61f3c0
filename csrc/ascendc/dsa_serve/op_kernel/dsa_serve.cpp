// dsa_serve in place: the misses of a layer go from the host pool to their slots of the hot pool, and so do the rows
// of the step's new tokens. Global memory:
//   host0, host1             rows of the host pool by component, at their device-visible address
//   hot0, hot1               [R, P, bytes], written
//   new_rows0, new_rows1     [T, bytes]
//   block_table [N, width], query_start_loc [N+1], rows [N], miss_ids [N, M], miss_slots [N, M], miss_counts [N],
//   new_slots [T]            int32
//   reports                  int64 [cores, 8], written: bytes fetched from the host, rows refused
#include "kernel_operator.h"

#include "../../common/core_report.h"
#include "../../common/host_table.h"
#include "../../common/miss_share.h"
#include "../../common/row_mover.h"
#include "dsa_serve_tiling_data.h"

namespace kvoffload::ascendc {

struct ServeArguments {
  GM_ADDR host[kComponents];
  GM_ADDR hot[kComponents];
  GM_ADDR new_rows[kComponents];
  GM_ADDR block_table;
  GM_ADDR query_start_loc;
  GM_ADDR rows;
  GM_ADDR miss_ids;
  GM_ADDR miss_slots;
  GM_ADDR miss_counts;
  GM_ADDR new_slots;
  GM_ADDR reports;
};

class Serve {
 public:
  __aicore__ inline void init(const ServeArguments& args, const ServeTiling& tiling) {
    tiling_ = tiling;
    mover_.init(pipe_, tiling.rows, kListEntries);
    mover_.source(kHost).init(args.host[0], args.host[1]);
    mover_.source(kNew).init(args.new_rows[0], args.new_rows[1]);
    mover_.destination().init(args.hot[0], args.hot[1]);
    table_.init(pipe_, tiling.host, args.block_table);
    rows_.init(pipe_, args.rows, tiling.requests);
    counts_.init(pipe_, args.miss_counts, tiling.requests);
    starts_.init(pipe_, args.query_start_loc, tiling.requests + 1);
    new_slots_.init(pipe_, args.new_slots, tiling.tokens);
    ids_.init(pipe_, args.miss_ids, kListEntries);
    slots_.init(pipe_, args.miss_slots, kListEntries);
    report_.init(pipe_, args.reports);
    rows_.fetch(0, tiling.requests);
    counts_.fetch(0, tiling.requests);
    starts_.fetch(0, tiling.requests + 1);
    new_slots_.fetch(0, tiling.tokens);
    KVOFFLOAD_ORDER(MTE2_S);
  }

  __aicore__ inline void run() {
    MissShare share(rows_, counts_, tiling_.requests, tiling_.miss_capacity, tiling_.by_request != 0);
    for (int32_t n = 0; n < tiling_.requests; ++n) {
      int32_t first = 0;
      int32_t last = 0;
      share.next(n, first, last);
      for (; first < last; first += kListEntries) {
        serve(n, first, last - first < kListEntries ? last - first : kListEntries);
      }
    }
    write_new_rows();
    report_.write(fetched_ * (tiling_.rows.bytes[0] + tiling_.rows.bytes[1]), refused_);
  }

 private:
  static constexpr int32_t kHost = 0;
  static constexpr int32_t kNew = 1;

  // Misses first, first + 1, ... of request n.
  __aicore__ inline void serve(int32_t n, int32_t first, int32_t count) {
    table_.fetch(n);
    KVOFFLOAD_ORDER(S_MTE2);  // the windows' last misses
    const uint64_t offset = static_cast<uint64_t>(n) * tiling_.miss_capacity + first;
    ids_.fetch(offset, count);
    slots_.fetch(offset, count);
    KVOFFLOAD_ORDER(MTE2_S);
    int32_t entries = 0;
    for (int32_t i = 0; i < count; ++i) {
      const int32_t from = table_.row(ids_[i]);
      if (from == kNoHostRow || !valid(rows_[n], slots_[i])) {
        ++refused_;
        continue;
      }
      mover_.set(entries++, kHost, from, rows_[n] * tiling_.slots + slots_[i]);
    }
    mover_.move(entries);
    fetched_ += entries;
  }

  __aicore__ inline bool valid(int32_t row, int32_t slot) const {
    return row >= 0 && row < tiling_.hot_rows && slot >= 0 && slot < tiling_.slots;
  }

  __aicore__ inline void write_new_rows() {
    int32_t entries = 0;
    for (int32_t n = 0; n < tiling_.requests; ++n) {
      const int32_t end = rows_[n] < 0 ? starts_[n] : starts_[n + 1];
      for (int32_t t = starts_[n]; t < end && t < tiling_.tokens; ++t) {
        const int32_t owner = (tiling_.by_request != 0 ? n : t) % static_cast<int32_t>(AscendC::GetBlockNum());
        if (owner != static_cast<int32_t>(AscendC::GetBlockIdx()) || new_slots_[t] < 0) continue;
        if (!valid(rows_[n], new_slots_[t])) {
          ++refused_;
          continue;
        }
        mover_.set(entries++, kNew, t, rows_[n] * tiling_.slots + new_slots_[t]);
        if (entries == kListEntries) {
          mover_.move(entries);
          entries = 0;
        }
      }
    }
    mover_.move(entries);
  }

  AscendC::TPipe pipe_;
  RowMover<2> mover_;
  HostTable table_;
  StagedInts rows_;
  StagedInts counts_;
  StagedInts starts_;
  StagedInts new_slots_;
  StagedInts ids_;
  StagedInts slots_;
  CoreReport report_;
  ServeTiling tiling_;
  int64_t fetched_ = 0;
  int64_t refused_ = 0;
};

}  // namespace kvoffload::ascendc

extern "C" __global__ __aicore__ void kvoffload_dsa_serve(
    GM_ADDR host0, GM_ADDR host1, GM_ADDR hot0, GM_ADDR hot1, GM_ADDR new_rows0, GM_ADDR new_rows1,
    GM_ADDR block_table, GM_ADDR query_start_loc, GM_ADDR rows, GM_ADDR miss_ids, GM_ADDR miss_slots,
    GM_ADDR miss_counts, GM_ADDR new_slots, GM_ADDR reports, kvoffload::ascendc::ServeTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  kvoffload::ascendc::Serve serve;
  serve.init({{host0, host1}, {hot0, hot1}, {new_rows0, new_rows1}, block_table, query_start_loc, rows, miss_ids,
              miss_slots, miss_counts, new_slots, reports},
             tiling);
  serve.run();
}
