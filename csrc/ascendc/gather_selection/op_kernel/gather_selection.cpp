// gather_selection, the baseline: a query's selection of the last step becomes that of this step. Rows that both want
// stay or move within it, the others come from the step's new rows and the host pool. Global memory:
//   host0, host1             rows of the host pool by component, at their device-visible address
//   new_rows0, new_rows1     [T, bytes]
//   selection0, selection1   [R, Q, K, bytes], updated
//   status                   int32 [R, Q, pitch], updated: id at each place, behind column K the number of ids
//   topk [T, K], query_start_loc [N+1], seq_lens [N], rows [N], block_table [N, width]      int32
//   lengths                  int32 [T], written
//   reports                  int64 [cores, 8], written: bytes fetched from the host, rows refused
#include "kernel_operator.h"

#include "../../common/core_report.h"
#include "../../common/host_table.h"
#include "../../common/id_table.h"
#include "../../common/row_mover.h"
#include "../../common/staged_ints.h"
#include "gather_selection_tiling_data.h"

namespace kvoffload::ascendc {

struct GatherArguments {
  GM_ADDR host[kComponents];
  GM_ADDR new_rows[kComponents];
  GM_ADDR selection[kComponents];
  GM_ADDR status;
  GM_ADDR topk;
  GM_ADDR query_start_loc;
  GM_ADDR seq_lens;
  GM_ADDR rows;
  GM_ADDR block_table;
  GM_ADDR lengths;
  GM_ADDR reports;
};

class Gather {
 public:
  __aicore__ inline void init(const GatherArguments& args, const GatherTiling& tiling) {
    tiling_ = tiling;
    mover_.init(pipe_, tiling.rows, kListEntries);
    mover_.source(kHost).init(args.host[0], args.host[1]);
    mover_.source(kNew).init(args.new_rows[0], args.new_rows[1]);
    mover_.source(kKept).init(args.selection[0], args.selection[1]);
    mover_.destination().init(args.selection[0], args.selection[1]);
    host_.init(pipe_, tiling.host, args.block_table);
    table_.init(pipe_, tiling.table_bits);
    rows_.init(pipe_, args.rows, tiling.requests);
    seq_lens_.init(pipe_, args.seq_lens, tiling.requests);
    starts_.init(pipe_, args.query_start_loc, tiling.requests + 1);
    topk_.init(pipe_, args.topk, tiling.width);
    previous_.init(pipe_, args.status, tiling.width + 1);
    init_buffers();
    status_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args.status));
    lengths_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args.lengths));
    report_.init(pipe_, args.reports);
    rows_.fetch(0, tiling.requests);
    seq_lens_.fetch(0, tiling.requests);
    starts_.fetch(0, tiling.requests + 1);
    KVOFFLOAD_ORDER(MTE2_S);
  }

  __aicore__ inline void run() {
    const int32_t items = tiling_.requests * tiling_.queries;
    for (int32_t item = AscendC::GetBlockIdx(); item < items; item += AscendC::GetBlockNum()) {
      const int32_t n = item / tiling_.queries;
      const int32_t query = item % tiling_.queries;
      if (!active(n)) continue;
      if (query < starts_[n + 1] - starts_[n]) {
        gather(n, query);
      } else {
        forget(n, query);
      }
    }
    report_.write(fetched_ * (tiling_.rows.bytes[0] + tiling_.rows.bytes[1]), refused_);
    AscendC::SyncAll();
    if (AscendC::GetBlockIdx() == 0) write_lengths();  // they share lines
  }

 private:
  static constexpr int32_t kHost = 0;
  static constexpr int32_t kNew = 1;
  static constexpr int32_t kKept = 2;
  static constexpr int32_t kEmpty = -1;
  static constexpr int32_t kUbIntsPerBlock = kUbBlockBytes / 4;

  __aicore__ inline void init_buffers() {
    const int32_t bytes = (tiling_.width * 4 + 4 + kUbBlockBytes - 1) / kUbBlockBytes * kUbBlockBytes;
    pipe_.InitBuffer(next_buffer_, bytes);
    pipe_.InitBuffer(wanted_buffer_, bytes);
    pipe_.InitBuffer(old_buffer_, bytes);
    pipe_.InitBuffer(lengths_buffer_, tiling_.tokens * kUbBlockBytes);
    pipe_.InitBuffer(zero_buffer_, kUbBlockBytes);
    next_ = next_buffer_.Get<int32_t>();
    wanted_ = wanted_buffer_.Get<int32_t>();
    old_place_ = old_buffer_.Get<int32_t>();
    zero_buffer_.Get<int32_t>().SetValue(0, 0);
  }

  __aicore__ inline bool active(int32_t n) const {
    return rows_[n] >= 0 && rows_[n] < tiling_.rows_kept && starts_[n + 1] > starts_[n] &&
           starts_[n + 1] - starts_[n] <= tiling_.queries && starts_[n + 1] <= tiling_.tokens;
  }

  __aicore__ inline int32_t entry(int32_t n, int32_t query) const { return rows_[n] * tiling_.queries + query; }

  // A draft accepted later must not meet the selection of one rejected earlier.
  __aicore__ inline void forget(int32_t n, int32_t query) {
    KVOFFLOAD_ORDER(S_MTE3);
    store(status_, static_cast<uint64_t>(entry(n, query)) * tiling_.status_pitch + tiling_.width,
          zero_buffer_.Get<int32_t>(), 1);
  }

  __aicore__ inline void gather(int32_t n, int32_t query) {
    const int32_t token = starts_[n] + query;
    stable_ = seq_lens_[n] - (starts_[n + 1] - starts_[n]);
    entry_ = entry(n, query);
    first_token_ = starts_[n];
    host_.fetch(n);
    KVOFFLOAD_ORDER(S_MTE2);  // the last selection's ids
    topk_.fetch(static_cast<uint64_t>(token) * tiling_.width, tiling_.width);
    previous_.fetch(static_cast<uint64_t>(entry_) * tiling_.status_pitch, tiling_.width + 1);
    clear();
    KVOFFLOAD_ORDER(MTE2_S);
    collect_wanted(stable_ + query);
    keep_hits();
    entries_ = 0;
    move_hits();
    fetch_others();
    mover_.move(entries_);
    write_status();
  }

  __aicore__ inline void clear() {
    KVOFFLOAD_ORDER(MTE3_V);  // after the last status write and earlier scalar work
    AscendC::Duplicate(next_, kEmpty, tiling_.width + 1);
    AscendC::Duplicate(old_place_, kEmpty, tiling_.width + 1);
    table_.clear();
    KVOFFLOAD_ORDER(V_S);
  }

  // Distinct ids that the query may attend to, in order.
  __aicore__ inline void collect_wanted(int32_t limit) {
    count_ = 0;
    for (int32_t k = 0; k < tiling_.width; ++k) {
      const int32_t id = topk_[k];
      if (id < 0 || id > limit) continue;
      const uint32_t at = table_.find(wanted_, id);
      if (table_.entry(at) >= 0) continue;
      table_.set(at, count_);
      wanted_.SetValue(count_++, id);
    }
  }

  __aicore__ inline int32_t previous_count() const {
    const int32_t count = previous_[tiling_.width];
    return count < 0 ? 0 : (count < tiling_.width ? count : tiling_.width);
  }

  // Index of a wanted id whose row stands at `place`; -1 when it is none, or may be a rejected draft's.
  __aicore__ inline int32_t wanted_at(int32_t place) const {
    const int32_t id = previous_[place];
    return id < 0 || id >= stable_ ? -1 : table_.entry(table_.find(wanted_, id));
  }

  __aicore__ inline void keep_hits() {
    const int32_t count = previous_count();
    for (int32_t place = 0; place < count; ++place) {
      const int32_t index = wanted_at(place);
      if (index < 0 || old_place_.GetValue(index) != kEmpty) continue;
      old_place_.SetValue(index, place);
      if (place < count_) next_.SetValue(place, previous_[place]);
    }
    free_ = 0;
  }

  __aicore__ inline int32_t take_free_place(int32_t id) {
    while (next_.GetValue(free_) != kEmpty) ++free_;
    next_.SetValue(free_, id);
    return free_;
  }

  // Hits behind the new selection's end.
  __aicore__ inline void move_hits() {
    const int32_t count = previous_count();
    for (int32_t place = count_; place < count; ++place) {
      const int32_t index = wanted_at(place);
      if (index < 0 || old_place_.GetValue(index) != place) continue;
      add(kKept, entry_ * tiling_.width + place, take_free_place(previous_[place]));
    }
  }

  __aicore__ inline void fetch_others() {
    for (int32_t index = 0; index < count_; ++index) {
      if (old_place_.GetValue(index) != kEmpty) continue;
      const int32_t id = wanted_.GetValue(index);
      const int32_t place = take_free_place(id);
      if (id >= stable_) {
        add(kNew, first_token_ + (id - stable_), place);
        continue;
      }
      const int32_t from = host_.row(id);
      if (from == kNoHostRow) {
        ++refused_;
        continue;
      }
      add(kHost, from, place);
      ++fetched_;
    }
  }

  __aicore__ inline void add(int32_t source, int32_t from, int32_t place) {
    if (entries_ == kListEntries) {
      mover_.move(entries_);
      entries_ = 0;
    }
    mover_.set(entries_++, source, from, entry_ * tiling_.width + place);
  }

  __aicore__ inline void write_status() {
    next_.SetValue(tiling_.width, count_);
    KVOFFLOAD_ORDER(S_MTE3);
    store(status_, static_cast<uint64_t>(entry_) * tiling_.status_pitch, next_, tiling_.width + 1);
  }

  // Lengths of all tokens, as the status has them. One block of the buffer for each, for they come from anywhere.
  __aicore__ inline void write_lengths() {
    AscendC::LocalTensor<int32_t> staged = lengths_buffer_.Get<int32_t>();
    for (int32_t n = 0; n < tiling_.requests; ++n) {
      if (!active(n)) continue;
      for (int32_t t = starts_[n]; t < starts_[n + 1] && t < tiling_.tokens; ++t) {
        load(staged[t * kUbIntsPerBlock], status_,
             static_cast<uint64_t>(entry(n, t - starts_[n])) * tiling_.status_pitch + tiling_.width, 1);
      }
    }
    KVOFFLOAD_ORDER(MTE2_S);
    for (int32_t t = 0; t < tiling_.tokens; ++t) staged.SetValue(t, length_of(staged, t));
    KVOFFLOAD_ORDER(S_MTE3);
    store(lengths_, 0, staged, tiling_.tokens);
  }

  // Called for t = 0, 1, ... in turn.
  __aicore__ inline int32_t length_of(const AscendC::LocalTensor<int32_t>& staged, int32_t t) {
    while (request_ < tiling_.requests && t >= starts_[request_ + 1]) ++request_;
    return request_ < tiling_.requests && active(request_) ? staged.GetValue(t * kUbIntsPerBlock) : 0;
  }

  AscendC::TPipe pipe_;
  RowMover<3> mover_;
  HostTable host_;
  IdTable table_;
  StagedInts rows_;
  StagedInts seq_lens_;
  StagedInts starts_;
  StagedInts topk_;
  StagedInts previous_;
  CoreReport report_;
  AscendC::GlobalTensor<int32_t> status_;
  AscendC::GlobalTensor<int32_t> lengths_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> next_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> wanted_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> old_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> lengths_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> zero_buffer_;
  AscendC::LocalTensor<int32_t> next_;       // the new status: id at each place
  AscendC::LocalTensor<int32_t> wanted_;     // ids of the query, distinct
  AscendC::LocalTensor<int32_t> old_place_;  // of each wanted id, -1: none
  GatherTiling tiling_;
  int32_t stable_ = 0;
  int32_t entry_ = 0;
  int32_t first_token_ = 0;
  int32_t count_ = 0;
  int32_t free_ = 0;
  int32_t entries_ = 0;
  int32_t request_ = 0;
  int64_t fetched_ = 0;
  int64_t refused_ = 0;
};

}  // namespace kvoffload::ascendc

// Batch scheduling: the kernel starts only when all its cores are free. Otherwise another stream's kernel could hold some
// of them while the others wait for them in SyncAll.
extern "C" __schedmode__(1) __global__ __aicore__ void kvoffload_gather_selection(
    GM_ADDR host0, GM_ADDR host1, GM_ADDR new_rows0, GM_ADDR new_rows1, GM_ADDR selection0, GM_ADDR selection1,
    GM_ADDR status, GM_ADDR topk, GM_ADDR query_start_loc, GM_ADDR seq_lens, GM_ADDR rows, GM_ADDR block_table,
    GM_ADDR lengths, GM_ADDR reports, kvoffload::ascendc::GatherTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
  kvoffload::ascendc::Gather gather;
  gather.init({{host0, host1}, {new_rows0, new_rows1}, {selection0, selection1}, status, topk, query_start_loc,
               seq_lens, rows, block_table, lengths, reports},
              tiling);
  gather.run();
}
