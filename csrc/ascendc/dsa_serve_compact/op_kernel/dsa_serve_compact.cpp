// dsa_serve_compact: the row of every top-k position goes to its place of a contiguous selection; zeros where there is
// none. Global memory:
//   host0, host1             rows of the host pool by component, at their device-visible address
//   hot0, hot1               [R, P, bytes]
//   new_rows0, new_rows1     [T, bytes]
//   selection0, selection1   [T, K, bytes], written
//   kinds [T, K, 2], query_start_loc [N+1], seq_lens [N], block_table [N, width], rows [N]      int32
//   reports                  int64 [cores, 8], written: bytes fetched from the host, rows refused (zeros instead)
#include "kernel_operator.h"

#include "../../common/core_report.h"
#include "../../common/host_table.h"
#include "../../common/row_mover.h"
#include "../../common/staged_ints.h"
#include "dsa_serve_compact_tiling_data.h"

namespace kvoffload::ascendc {

struct ServeCompactArguments {
  GM_ADDR host[kComponents];
  GM_ADDR hot[kComponents];
  GM_ADDR new_rows[kComponents];
  GM_ADDR selection[kComponents];
  GM_ADDR kinds;
  GM_ADDR query_start_loc;
  GM_ADDR seq_lens;
  GM_ADDR block_table;
  GM_ADDR rows;
  GM_ADDR reports;
};

class ServeCompact {
 public:
  __aicore__ inline void init(const ServeCompactArguments& args, const ServeCompactTiling& tiling) {
    tiling_ = tiling;
    mover_.init(pipe_, tiling.rows, kListEntries);
    mover_.init_zeros(pipe_);
    mover_.source(kHost).init(args.host[0], args.host[1]);
    mover_.source(kHot).init(args.hot[0], args.hot[1]);
    mover_.source(kNew).init(args.new_rows[0], args.new_rows[1]);
    mover_.destination().init(args.selection[0], args.selection[1]);
    table_.init(pipe_, tiling.host, args.block_table);
    rows_.init(pipe_, args.rows, tiling.requests);
    lengths_.init(pipe_, args.seq_lens, tiling.requests);
    starts_.init(pipe_, args.query_start_loc, tiling.requests + 1);
    kinds_.init(pipe_, args.kinds, 2 * kListEntries);
    report_.init(pipe_, args.reports);
    rows_.fetch(0, tiling.requests);
    lengths_.fetch(0, tiling.requests);
    starts_.fetch(0, tiling.requests + 1);
    KVOFFLOAD_ORDER(MTE2_S);
  }

  __aicore__ inline void run() {
    const int64_t positions = static_cast<int64_t>(tiling_.tokens) * tiling_.width;
    const int64_t groups = (positions + tiling_.group - 1) / tiling_.group;
    const int64_t cores = AscendC::GetBlockNum();
    int64_t first = groups * AscendC::GetBlockIdx() / cores * tiling_.group;
    int64_t end = groups * (AscendC::GetBlockIdx() + 1) / cores * tiling_.group;
    if (end > positions) end = positions;
    while (first < end) {  // in windows that end with a token, as a request does
      const int64_t token_end = (first / tiling_.width + 1) * tiling_.width;
      int64_t last = token_end < end ? token_end : end;
      if (last > first + kListEntries) last = first + kListEntries;
      serve(static_cast<int32_t>(first), static_cast<int32_t>(last - first));
      first = last;
    }
    report_.write(fetched_ * (tiling_.rows.bytes[0] + tiling_.rows.bytes[1]), refused_);
  }

 private:
  static constexpr int32_t kHost = 0;
  static constexpr int32_t kHot = 1;
  static constexpr int32_t kNew = 2;
  static constexpr int32_t kPoolHit = 1;  // kinds, see vllm_kvoffload/ops/types.py
  static constexpr int32_t kOldMiss = 2;
  static constexpr int32_t kDecodeWindow = 3;

  // Positions first, first + 1, ... of one token.
  __aicore__ inline void serve(int32_t first, int32_t count) {
    const int32_t token = first / tiling_.width;
    while (request_ < tiling_.requests && token >= starts_[request_ + 1]) ++request_;
    const bool planned = request_ < tiling_.requests && rows_[request_] >= 0 && rows_[request_] < tiling_.hot_rows;
    if (planned) table_.fetch(request_);
    KVOFFLOAD_ORDER(S_MTE2);  // the window's last kinds
    kinds_.fetch(static_cast<uint64_t>(first) * 2, count * 2);
    KVOFFLOAD_ORDER(MTE2_S);
    for (int32_t i = 0; i < count; ++i) {
      if (planned) {
        select(i, first + i, kinds_[2 * i], kinds_[2 * i + 1]);
      } else {
        mover_.set(i, kNoSource, 0, first + i);
      }
    }
    mover_.move(count);
  }

  __aicore__ inline void select(int32_t entry, int32_t to, int32_t kind, int32_t index) {
    int32_t source = kNoSource;
    int32_t from = 0;
    if (kind == kPoolHit && index >= 0 && index < tiling_.slots) {
      source = kHot;
      from = rows_[request_] * tiling_.slots + index;
    } else if (kind == kOldMiss) {
      from = table_.row(index);
      if (from != kNoHostRow) source = kHost;
    } else if (kind == kDecodeWindow) {
      const int32_t start = starts_[request_];
      const int32_t stable = lengths_[request_] - (starts_[request_ + 1] - start);
      from = start + (index - stable);
      if (from >= start && from < starts_[request_ + 1]) source = kNew;
    }
    if (source == kHost) ++fetched_;
    if (source == kNoSource && kind >= kPoolHit && kind <= kDecodeWindow) ++refused_;
    mover_.set(entry, source, from, to);
  }

  AscendC::TPipe pipe_;
  RowMover<3> mover_;
  HostTable table_;
  StagedInts rows_;
  StagedInts lengths_;
  StagedInts starts_;
  StagedInts kinds_;
  CoreReport report_;
  ServeCompactTiling tiling_;
  int32_t request_ = 0;
  int64_t fetched_ = 0;
  int64_t refused_ = 0;
};

}  // namespace kvoffload::ascendc

extern "C" __global__ __aicore__ void kvoffload_dsa_serve_compact(
    GM_ADDR host0, GM_ADDR host1, GM_ADDR hot0, GM_ADDR hot1, GM_ADDR new_rows0, GM_ADDR new_rows1,
    GM_ADDR selection0, GM_ADDR selection1, GM_ADDR kinds, GM_ADDR query_start_loc, GM_ADDR seq_lens,
    GM_ADDR block_table, GM_ADDR rows, GM_ADDR reports, kvoffload::ascendc::ServeCompactTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  kvoffload::ascendc::ServeCompact serve;
  serve.init({{host0, host1}, {hot0, hot1}, {new_rows0, new_rows1}, {selection0, selection1}, kinds, query_start_loc,
              seq_lens, block_table, rows, reports},
             tiling);
  serve.run();
}
