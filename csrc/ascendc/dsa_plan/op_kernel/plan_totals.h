// Third phase of dsa_plan, on one core: outputs of which several requests share a line.
#pragma once

#include "plan_request.h"

namespace kvoffload::ascendc {

class PlanTotals {
 public:
  __aicore__ inline void init(AscendC::TPipe& pipe, const PlanArguments& args, const PlanTiling& tiling) {
    tiling_ = tiling;
    requests_.init(pipe, args, tiling);
    totals_gm_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args.workspace + tiling.totals_offset));
    pipe.InitBuffer(totals_buffer_, kRequests * kRecordInts * 4);
    pipe.InitBuffer(sums_buffer_, kRequests / 2 * kRecordInts * 4);
    pipe.InitBuffer(counts_buffer_, kRequests * 4);
    pipe.InitBuffer(high_buffer_, kRequests * kUbBlockBytes);
    pipe.InitBuffer(new_slots_buffer_, kNewSlots * 4);
    pipe.InitBuffer(stats_buffer_, kLineBytes);
    totals_ = totals_buffer_.Get<int32_t>();
    sums_ = sums_buffer_.Get<int32_t>();
    counts_ = counts_buffer_.Get<int32_t>();
    lengths_ = high_buffer_.Get<int32_t>();
    new_slots_ = new_slots_buffer_.Get<int32_t>();
    miss_counts_gm_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args.miss_counts));
    new_slots_gm_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args.new_slots));
    high_gm_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args.high));
    stats_gm_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args.stats));
  }

  __aicore__ inline void run() {
    for (int32_t first = 0; first < tiling_.requests; first += kRequests) {
      const int32_t count = first + kRequests < tiling_.requests ? kRequests : tiling_.requests - first;
      KVOFFLOAD_ORDER(MTE3_S);  // the requests before on their way out
      KVOFFLOAD_ORDER(S_V);
      AscendC::Duplicate(totals_, 0, kRequests * kRecordInts);  // behind the last request
      KVOFFLOAD_ORDER(V_MTE2);
      load(totals_, totals_gm_, static_cast<uint64_t>(first) * kRecordInts, count * kRecordInts);
      KVOFFLOAD_ORDER(MTE2_V);
      add_stats();  // after it the scalar unit may read the totals, too
      for (int32_t at = 0; at < count; ++at) add(first + at, at);
      KVOFFLOAD_ORDER(S_MTE3);
      store(miss_counts_gm_, first, counts_, count);
      for (int32_t at = 0; at < count; ++at) {
        const int32_t row = total(at, kTotalRow);
        if (row >= 0) store(high_gm_, row, lengths_[at * kUbBlockBytes / 4], 1);
      }
    }
    while (token_ < tiling_.tokens) append(-1);
    flush();
    write_stats();
  }

 private:
  static constexpr int32_t kRequests = 32;  // at a time
  static constexpr int32_t kNewSlots = 32;

  __aicore__ inline int32_t total(int32_t at, int32_t which) const {
    return totals_.GetValue(at * kRecordInts + which);
  }

  // The sum of the requests' records.
  __aicore__ inline void add_stats() {
    int32_t half = kRequests / 2 * kRecordInts;
    AscendC::Add(sums_, totals_, totals_[half], half);
    AscendC::PipeBarrier<PIPE_V>();
    while (half > kRecordInts) {
      half /= 2;
      AscendC::Add(sums_, sums_, sums_[half], half);
      AscendC::PipeBarrier<PIPE_V>();
    }
    KVOFFLOAD_ORDER(V_S);
    for (int32_t i = 0; i < kTotalCount; ++i) stats_[i] += sums_.GetValue(i);
  }

  __aicore__ inline void add(int32_t n, int32_t at) {
    counts_.SetValue(at, total(at, kTotalMisses));
    lengths_.SetValue(at * kUbBlockBytes / 4, total(at, kTotalLength));
    const int32_t query = requests_.query(n);
    for (int32_t t = 0; t < query; ++t) append(t < kMaxQueryTokens ? total(at, kRecordNewSlots + t) : -1);
  }

  // The slot of the next token.
  __aicore__ inline void append(int32_t slot) {
    if (token_ == tiling_.tokens) return;
    if (token_ - stored_ == kNewSlots) flush();
    new_slots_.SetValue(token_ - stored_, slot);
    ++token_;
  }

  __aicore__ inline void flush() {
    KVOFFLOAD_ORDER(S_MTE3);
    if (token_ > stored_) store(new_slots_gm_, stored_, new_slots_, token_ - stored_);
    stored_ = token_;
    KVOFFLOAD_ORDER(MTE3_S);
  }

  __aicore__ inline void write_stats() {
    AscendC::LocalTensor<int64_t> stats = stats_buffer_.Get<int64_t>();
    for (int32_t i = 0; i < kTotalCount; ++i) stats.SetValue(i, stats_[i]);
    KVOFFLOAD_ORDER(S_MTE3);
    store(stats_gm_, 0, stats_buffer_.Get<int32_t>(), 2 * kTotalCount);
  }

  PlanTiling tiling_;
  PlanRequests requests_;
  AscendC::GlobalTensor<int32_t> totals_gm_;
  AscendC::GlobalTensor<int32_t> miss_counts_gm_;
  AscendC::GlobalTensor<int32_t> new_slots_gm_;
  AscendC::GlobalTensor<int32_t> high_gm_;
  AscendC::GlobalTensor<int32_t> stats_gm_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> totals_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> sums_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> counts_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> high_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> new_slots_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> stats_buffer_;
  AscendC::LocalTensor<int32_t> totals_;
  AscendC::LocalTensor<int32_t> sums_;
  AscendC::LocalTensor<int32_t> counts_;
  AscendC::LocalTensor<int32_t> lengths_;  // one block each, for partitions are anywhere
  AscendC::LocalTensor<int32_t> new_slots_;
  int64_t stats_[kTotalCount] = {};
  int32_t token_ = 0;
  int32_t stored_ = 0;
};

}  // namespace kvoffload::ascendc
