// Second phase of dsa_plan: one core puts a request's plan together. It adds up the parts' results, places the ids
// whose set was full elsewhere (rare), gives a slot to new tokens outside every top-k, and writes the outputs.
#pragma once

#include "../../common/id_table.h"
#include "../../common/numbers.h"
#include "plan_kinds.h"
#include "plan_request.h"
#include "set_state.h"

namespace kvoffload::ascendc {

template <class P>
class PlanRows {
 public:
  __aicore__ inline void init(AscendC::TPipe& pipe, const PlanArguments& args, const PlanTiling& tiling) {
    tiling_ = tiling;
    row_slots_ = tiling.sets * tiling.ways;
    requests_.init(pipe, args, tiling);
    init_positions(pipe);
    init_state(pipe);
    if (tiling.compact != 0) kinds_.init(pipe, args, tiling);
    init_global(args);
    KVOFFLOAD_ORDER(S_MTE3);
  }

  __aicore__ inline void run() {
    const int32_t cores = AscendC::GetBlockNum();
    const int32_t self = AscendC::GetBlockIdx();
    for (int32_t n = 0; n < tiling_.requests; ++n) {
      if (n % cores != self) continue;
      if (requests_.planned(n)) {
        plan(n);
      } else {
        for (int32_t t = requests_.first_token(n); t < requests_.end_token(n); ++t) leave_out(t);
        KVOFFLOAD_ORDER(MTE3_S);  // the request before on its way out
        for (int32_t i = 0; i < kRecordInts; ++i) totals_.SetValue(i, i < kTotalCount ? 0 : -1);
        store_totals(n);
      }
    }
    for (int32_t t = requests_.first_token(tiling_.requests); t < tiling_.tokens; ++t) {  // of no request
      if (t % cores == self) leave_out(t);
    }
  }

 private:
  __aicore__ inline void init_positions(AscendC::TPipe& pipe) {
    const int32_t positions = tiling_.max_query * tiling_.padded_width;
    const int32_t width = tiling_.padded_width;
    pipe.InitBuffer(ids_buffer_, positions * 4);
    pipe.InitBuffer(values_buffer_, positions * 4);
    pipe.InitBuffer(lists_buffer_, 4 * width * 4);
    pipe.InitBuffer(parts_, 2, width * 4);
    pipe.InitBuffer(mask_buffer_, width / 8);
    ids_ = ids_buffer_.Get<int32_t>();
    values_ = values_buffer_.Get<int32_t>();
    AscendC::LocalTensor<int32_t> lists = lists_buffer_.Get<int32_t>();
    numbers_ = lists;
    how_ = lists[width];
    slots_ = lists[2 * width];
    list_ = lists[3 * width];
    mask_ = mask_buffer_.Get<uint8_t>();
    number(numbers_, 0, width);
    AscendC::Duplicate(ids_, -1, positions);    // behind the ids of each token
    AscendC::Duplicate(values_, 0, positions);  // and behind their values
  }

  __aicore__ inline void init_state(AscendC::TPipe& pipe) {
    pipe.InitBuffer(states_buffer_, row_slots_);
    pipe.InitBuffer(hands_buffer_, tiling_.sets);
    pipe.InitBuffer(empties_buffer_, row_slots_ / 8);
    pipe.InitBuffer(age_bits_buffer_, kScanSlots);
    pipe.InitBuffer(records_buffer_, tiling_.parts * kRecordInts * 4);
    pipe.InitBuffer(totals_buffer_, kRecordInts * 4);
    pipe.InitBuffer(tags_buffer_, (kMaxQueryTokens + 1) * kUbBlockBytes);
    table_.init(pipe, tiling_.id_table_bits);
    records_ = records_buffer_.Get<int32_t>();
    totals_ = totals_buffer_.Get<int32_t>();
    tags_ = tags_buffer_.Get<int32_t>();
    sets_.init(states_buffer_.Get<uint8_t>(), hands_buffer_.Get<uint8_t>(), empties_buffer_.Get<uint8_t>(),
               tiling_.way_bits);
    AscendC::Duplicate(age_bits_buffer_.Get<uint16_t>(), static_cast<uint16_t>(kAgeMask * 0x0101), kScanSlots / 2);
    tags_.SetValue(0, -1);
  }

  __aicore__ inline void init_global(const PlanArguments& args) {
    topk_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args.topk));
    row_tags_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args.tags));
    row_ages_.SetGlobalBuffer(args.ages);
    row_hands_.SetGlobalBuffer(args.hands);
    slots_gm_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args.slots));
    miss_ids_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args.miss_ids));
    miss_slots_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args.miss_slots));
    miss_positions_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args.miss_positions));
    part_values_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args.workspace + tiling_.values_offset));
    part_records_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args.workspace + tiling_.records_offset));
    request_totals_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args.workspace + tiling_.totals_offset));
    part_states_.SetGlobalBuffer(args.workspace + tiling_.states_offset);
    part_empties_.SetGlobalBuffer(args.workspace + tiling_.empties_offset);
  }

  // A token without a plan.
  __aicore__ inline void leave_out(int32_t token) {
    AscendC::Duplicate(slots_, -1, tiling_.width);
    KVOFFLOAD_ORDER(V_MTE3);
    store(slots_gm_, static_cast<uint64_t>(token) * tiling_.width, slots_, tiling_.width);
    KVOFFLOAD_ORDER(MTE3_V);
    if (tiling_.compact != 0) kinds_.leave_out(token);
  }

  __aicore__ inline void plan(int32_t n) {
    request_ = n;
    query_ = requests_.query(n);
    stable_ = requests_.seq_len(n) - query_;
    add_parts();
    add_records();
    if (overflow_ > 0 || missing_new_token()) {
      load_state();
      if (overflow_ > 0) displace_all();
      place_new_tokens();
      store_state();
    }
    miss_count_ = 0;
    for (int32_t t = 0; t < query_; ++t) write_token(t);
    if (overflow_ > 0) {
      for (int32_t t = 0; t < query_; ++t) {
        find_how(t);
        write_misses(t, kHowDisplacedMiss);
      }
    }
    store_totals(n);
  }

  __aicore__ inline void store_totals(int32_t n) {
    KVOFFLOAD_ORDER(S_MTE3);
    store(request_totals_, static_cast<uint64_t>(n) * kRecordInts, totals_, kRecordInts);
  }

  __aicore__ inline uint64_t part_token(int32_t part, int32_t t) const {
    return ((static_cast<uint64_t>(request_) * tiling_.parts + part) * tiling_.max_query + t) * tiling_.width;
  }

  __aicore__ inline void add_parts() {
    KVOFFLOAD_ORDER(MTE3_MTE2);  // the request before on its way out
    KVOFFLOAD_ORDER(V_MTE2);     // and its ids being read
    load(records_, part_records_, static_cast<uint64_t>(request_) * tiling_.parts * kRecordInts,
         tiling_.parts * kRecordInts);
    for (int32_t t = 0; t < query_; ++t) {
      const int32_t at = t * tiling_.padded_width;
      load(ids_[at], topk_, static_cast<uint64_t>(requests_.first_token(request_) + t) * tiling_.width, tiling_.width);
      load(values_[at], part_values_, part_token(0, t), tiling_.width);
    }
    KVOFFLOAD_ORDER(MTE2_S);
    KVOFFLOAD_ORDER(MTE2_V);
    const int32_t others = (tiling_.parts - 1) * query_;  // while one is added the next is read
    for (int32_t i = 0; i < others; ++i) {
      read_part(1 + i / query_, i % query_);
      if (i > 0) add_part((i - 1) % query_);
    }
    if (others > 0) add_part((others - 1) % query_);
  }

  __aicore__ inline void read_part(int32_t part, int32_t t) {
    AscendC::LocalTensor<int32_t> values = parts_.AllocTensor<int32_t>();
    load(values, part_values_, part_token(part, t), tiling_.width);
    parts_.EnQue(values);
  }

  __aicore__ inline void add_part(int32_t t) {
    AscendC::LocalTensor<int32_t> values = parts_.DeQue<int32_t>();
    const int32_t at = t * tiling_.padded_width;
    AscendC::Add(values_[at], values_[at], values, tiling_.width);
    AscendC::PipeBarrier<PIPE_V>();
    parts_.FreeTensor(values);
  }

  __aicore__ inline int32_t sum(int32_t which) const {
    int32_t total = 0;
    for (int32_t part = 0; part < tiling_.parts; ++part) total += records_.GetValue(part * kRecordInts + which);
    return total;
  }

  __aicore__ inline void add_records() {
    overflow_ = sum(kRecordOverflow);
    const int32_t placed = sum(kRecordMisses) + sum(kRecordNew) + sum(kRecordDuplicates);
    totals_.SetValue(kTotalHits, sum(kRecordHits));
    totals_.SetValue(kTotalMisses, sum(kRecordMisses));
    totals_.SetValue(kTotalNew, sum(kRecordNew));
    totals_.SetValue(kTotalDisplaced, 0);
    totals_.SetValue(kTotalDuplicates, sum(kRecordDuplicates) + sum(kRecordHitPositions) - sum(kRecordHits));
    totals_.SetValue(kTotalInvalid, query_ * tiling_.width - sum(kRecordHitPositions) - placed - overflow_);
    totals_.SetValue(kTotalLength, requests_.seq_len(request_));
    totals_.SetValue(kTotalRow, requests_.row(request_));
    for (int32_t i = kRecordNewSlots; i < kRecordInts; ++i) totals_.SetValue(i, -1);
    for (int32_t t = 0; t < query_; ++t) {
      totals_.SetValue(kRecordNewSlots + t, sum(kRecordNewSlots + t) - 1);
    }
  }

  __aicore__ inline void count(int32_t which) { totals_.SetValue(which, totals_.GetValue(which) + 1); }

  __aicore__ inline bool missing_new_token() const {
    for (int32_t t = 0; t < query_; ++t) {
      if (totals_.GetValue(kRecordNewSlots + t) < 0) return true;
    }
    return false;
  }

  __aicore__ inline uint64_t first_set() const {
    return static_cast<uint64_t>(requests_.row(request_)) * tiling_.sets;
  }

  __aicore__ inline void load_state() {
    load(states_buffer_.Get<uint8_t>(), part_states_, static_cast<uint64_t>(request_) * row_slots_, row_slots_);
    load(empties_buffer_.Get<uint8_t>(), part_empties_, static_cast<uint64_t>(request_) * row_slots_ / 8,
         row_slots_ / 8);
    load(hands_buffer_.Get<uint8_t>(), row_hands_, first_set(), tiling_.sets);
    KVOFFLOAD_ORDER(MTE2_S);
  }

  __aicore__ inline void store_state() {
    KVOFFLOAD_ORDER(S_V);
    AscendC::LocalTensor<uint16_t> ages = states_buffer_.Get<uint16_t>();
    for (int32_t lane = 0; lane < row_slots_ / 2; lane += kScanSlots / 2) {
      AscendC::And(ages[lane], ages[lane], age_bits_buffer_.Get<uint16_t>(), kScanSlots / 2);
    }
    KVOFFLOAD_ORDER(V_MTE3);
    store(row_ages_, first_set() * tiling_.ways, states_buffer_.Get<uint8_t>(), row_slots_);
    store(row_hands_, first_set(), hands_buffer_.Get<uint8_t>(), tiling_.sets);
  }

  // I-4: ids whose own set is full of ids that this step needs get any other slot of the partition. Left untagged, it
  // is forgotten after the step.
  __aicore__ inline void displace_all() {
    table_.clear();
    for (int32_t t = 0; t < query_; ++t) {
      find_how(t);
      const uint64_t count = pack(list_, numbers_, kHowOverflow);
      KVOFFLOAD_ORDER(V_S);
      for (uint64_t i = 0; i < count; ++i) {
        const int32_t position = t * tiling_.padded_width + list_.GetValue(i);
        values_.SetValue(position, displace(position, ids_.GetValue(position)));
      }
      KVOFFLOAD_ORDER(S_V);
    }
  }

  // Returns the plan value of a position.
  __aicore__ inline int32_t displace(int32_t position, int32_t id) {
    const uint32_t entry = table_.find(ids_, id);
    const int32_t earlier = table_.entry(entry);
    if (earlier >= 0) {
      count(kTotalDuplicates);
      return plan_value(kHowDuplicate, slot_at(earlier));
    }
    table_.set(entry, position);
    const int32_t slot = take_slot_elsewhere(id & (tiling_.sets - 1));
    sets_.set_byte(slot, kWayNeeded);
    store(row_tags_, first_set() * tiling_.ways + slot, tags_, 1);
    count(kTotalDisplaced);
    if (id < stable_) {
      count(kTotalMisses);
      return plan_value(kHowDisplacedMiss, slot);
    }
    count(kTotalNew);
    totals_.SetValue(kRecordNewSlots + id - stable_, slot);
    return plan_value(kHowDisplacedNew, slot);
  }

  __aicore__ inline int32_t slot_at(int32_t position) const {
    return (values_.GetValue(position) & ((1 << kHowBits) - 1)) - 1;
  }

  // A partition has at least as many slots as a request has ids, so that one is found.
  __aicore__ inline int32_t take_slot_elsewhere(int32_t home) {
    int32_t set = home;
    int32_t way = kNoWay;
    for (int32_t i = 1; i < tiling_.sets && way == kNoWay; ++i) {
      set = (home + i) & (tiling_.sets - 1);
      way = SetStates::Set(sets_, set).template take_way<P>();
    }
    return set * tiling_.ways + way;
  }

  // Tokens of this step are likely to be selected by the next one, so they stay if that costs the step nothing.
  __aicore__ inline void place_new_tokens() {
    for (int32_t t = 0; t < query_; ++t) {
      if (totals_.GetValue(kRecordNewSlots + t) >= 0) continue;
      const int32_t id = stable_ + t;
      const int32_t set = id & (tiling_.sets - 1);
      const int32_t way = SetStates::Set(sets_, set).template take_way<P>();
      if (way == kNoWay) continue;
      const int32_t slot = set * tiling_.ways + way;
      sets_.set_byte(slot, kWayNeeded | P::kNewAge);
      const int32_t staged = (1 + t) * kUbBlockBytes / 4;
      tags_.SetValue(staged, id);
      KVOFFLOAD_ORDER(S_MTE3);
      store(row_tags_, first_set() * tiling_.ways + slot, tags_[staged], 1);
      totals_.SetValue(kRecordNewSlots + t, slot);
      count(kTotalNew);
    }
  }

  // how_ and slots_ of one token.
  __aicore__ inline void find_how(int32_t t) {
    const AscendC::LocalTensor<int32_t> values = values_[t * tiling_.padded_width];
    const int32_t width = tiling_.padded_width;
    AscendC::ShiftRight(how_, values, kHowBits, width);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::ShiftLeft(slots_, how_, kHowBits, width);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Sub(slots_, values, slots_, width);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Adds(slots_, slots_, -1, width);
  }

  // The elements of positions with that how_ move to the front of `to`; returns how many.
  __aicore__ inline uint64_t pack(const AscendC::LocalTensor<int32_t>& to, const AscendC::LocalTensor<int32_t>& from,
                                  int32_t how) {
    AscendC::CompareScalar(mask_, how_, how, AscendC::CMPMODE::EQ, tiling_.padded_width);
    AscendC::PipeBarrier<PIPE_V>();
    uint64_t kept = 0;
    AscendC::GatherMask(to, from, mask_.ReinterpretCast<uint32_t>(), true, tiling_.padded_width, {1, 1, 8, 8}, kept);
    return kept;
  }

  __aicore__ inline void write_token(int32_t t) {
    find_how(t);
    const int32_t token = requests_.first_token(request_) + t;
    KVOFFLOAD_ORDER(V_MTE3);
    store(slots_gm_, static_cast<uint64_t>(token) * tiling_.width, slots_, tiling_.width);
    if (tiling_.compact != 0) {
      kinds_.write(token, ids_[t * tiling_.padded_width], how_, slots_, stable_, stable_ + t);
    }
    write_misses(t, kHowMiss);
    KVOFFLOAD_ORDER(MTE3_V);
  }

  // Appends the misses of one token's positions to the request's lists.
  __aicore__ inline void write_misses(int32_t t, int32_t how) {
    const uint64_t offset = static_cast<uint64_t>(request_) * tiling_.miss_capacity + miss_count_;
    const int32_t count = static_cast<int32_t>(pack(list_, ids_[t * tiling_.padded_width], how));
    if (count == 0) return;
    write_list(miss_ids_, offset, count);
    pack(list_, slots_, how);
    write_list(miss_slots_, offset, count);
    if (tiling_.compact != 0) {
      pack(list_, numbers_, how);
      AscendC::PipeBarrier<PIPE_V>();
      AscendC::Adds(list_, list_, t * tiling_.width, count);
      write_list(miss_positions_, offset, count);
    }
    miss_count_ += count;
  }

  __aicore__ inline void write_list(const AscendC::GlobalTensor<int32_t>& to, uint64_t offset, int32_t count) {
    KVOFFLOAD_ORDER(V_MTE3);
    store(to, offset, list_, count);
    KVOFFLOAD_ORDER(MTE3_V);
  }

  PlanTiling tiling_;
  PlanRequests requests_;
  PlanKinds kinds_;
  SetStates sets_;
  IdTable table_;
  AscendC::GlobalTensor<int32_t> topk_;
  AscendC::GlobalTensor<int32_t> row_tags_;
  AscendC::GlobalTensor<uint8_t> row_ages_;
  AscendC::GlobalTensor<uint8_t> row_hands_;
  AscendC::GlobalTensor<int32_t> slots_gm_;
  AscendC::GlobalTensor<int32_t> miss_ids_;
  AscendC::GlobalTensor<int32_t> miss_slots_;
  AscendC::GlobalTensor<int32_t> miss_positions_;
  AscendC::GlobalTensor<int32_t> part_values_;
  AscendC::GlobalTensor<int32_t> part_records_;
  AscendC::GlobalTensor<int32_t> request_totals_;
  AscendC::GlobalTensor<uint8_t> part_states_;
  AscendC::GlobalTensor<uint8_t> part_empties_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> ids_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> values_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> lists_buffer_;
  AscendC::TQue<AscendC::TPosition::VECIN, 2> parts_;  // values of one part and token
  AscendC::TBuf<AscendC::TPosition::VECCALC> mask_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> states_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> hands_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> empties_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> age_bits_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> records_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> totals_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> tags_buffer_;
  AscendC::LocalTensor<int32_t> ids_;
  AscendC::LocalTensor<int32_t> values_;
  AscendC::LocalTensor<int32_t> numbers_;  // 0, 1, 2, ...
  AscendC::LocalTensor<int32_t> how_;
  AscendC::LocalTensor<int32_t> slots_;
  AscendC::LocalTensor<int32_t> list_;
  AscendC::LocalTensor<uint8_t> mask_;
  AscendC::LocalTensor<int32_t> records_;
  AscendC::LocalTensor<int32_t> totals_;
  AscendC::LocalTensor<int32_t> tags_;  // staged for global memory: -1, then one block for each new token
  int32_t row_slots_ = 0;
  int32_t request_ = 0;
  int32_t query_ = 0;
  int32_t stable_ = 0;
  int32_t overflow_ = 0;
  int32_t miss_count_ = 0;
};

}  // namespace kvoffload::ascendc
