// First phase of dsa_plan: one core plans one range of sets of one partition. Ids live in one set only and a set's ways
// are selected without looking at other sets, so that the parts of a partition need nothing of each other. Everything
// else (ids whose set is full, the order of the misses) is left to the second phase.
#pragma once

#include "look_up.h"
#include "plan_request.h"
#include "set_state.h"

namespace kvoffload::ascendc {

template <class P>
class PlanSets {
 public:
  __aicore__ inline void init(AscendC::TPipe& pipe, const PlanArguments& args, const PlanTiling& tiling) {
    tiling_ = tiling;
    part_slots_ = tiling.part_sets * tiling.ways;
    requests_.init(pipe, args, tiling);
    look_up_.init(pipe, tiling);
    init_state(pipe);
    init_positions(pipe);
    init_global(args);
  }

  __aicore__ inline void run() {
    const int32_t items = tiling_.requests * tiling_.parts;
    for (int32_t item = AscendC::GetBlockIdx(); item < items; item += AscendC::GetBlockNum()) {
      if (requests_.planned(item / tiling_.parts)) plan(item / tiling_.parts, item % tiling_.parts);
    }
  }

 private:
  static constexpr int32_t kByteLanes = kScanSlots / 2;  // int16 lanes of the ways' bytes handled at a time

  __aicore__ inline void init_state(AscendC::TPipe& pipe) {
    pipe.InitBuffer(tags_buffer_, part_slots_ * 4);
    pipe.InitBuffer(states_buffer_, part_slots_);
    pipe.InitBuffer(hands_buffer_, tiling_.part_sets);
    pipe.InitBuffer(empties_buffer_, part_slots_ / 8);
    pipe.InitBuffer(high_buffer_, kUbBlockBytes);
    pipe.InitBuffer(record_buffer_, kRecordInts * 4);
    pipe.InitBuffer(bytes_buffer_, 3 * kScanSlots);
    pipe.InitBuffer(sums_buffer_, 2 * kLineBytes);
    tags_ = tags_buffer_.Get<int32_t>();
    states_ = states_buffer_.Get<uint8_t>();
    record_ = record_buffer_.Get<int32_t>();
    AscendC::LocalTensor<uint16_t> bytes = bytes_buffer_.Get<uint16_t>();
    age_bits_ = bytes;
    needed_bits_ = bytes[kByteLanes];
    lanes_ = bytes[2 * kByteLanes];
    sums_ = sums_buffer_.Get<uint16_t>();
    AscendC::Duplicate(age_bits_, static_cast<uint16_t>(kAgeMask * 0x0101), kByteLanes);
    AscendC::Duplicate(needed_bits_, static_cast<uint16_t>(kWayNeeded * 0x0101), kByteLanes);
    empties_ = empties_buffer_.Get<uint8_t>();
    sets_.init(states_, hands_buffer_.Get<uint8_t>(), empties_, tiling_.way_bits);
  }

  __aicore__ inline void init_positions(AscendC::TPipe& pipe) {
    const int32_t positions = tiling_.max_query * tiling_.padded_width;
    pipe.InitBuffer(ids_buffer_, positions * 4);
    pipe.InitBuffer(values_buffer_, positions * 4);
    pipe.InitBuffer(list_buffer_, tiling_.list_entries * 4);
    pipe.InitBuffer(list_ids_buffer_, tiling_.list_entries * 4);
    pipe.InitBuffer(numbers_buffer_, tiling_.list_entries * 4);
    pipe.InitBuffer(short_slots_buffer_, tiling_.list_entries * 2);
    pipe.InitBuffer(pending_buffer_, positions / 8);
    pipe.InitBuffer(hit_buffer_, tiling_.padded_width / 8);
    pipe.InitBuffer(dropped_buffer_, kScanSlots / 8);
    ids_ = ids_buffer_.Get<int32_t>();
    values_ = values_buffer_.Get<int32_t>();
    list_ = list_buffer_.Get<int32_t>();
    list_ids_ = list_ids_buffer_.Get<int32_t>();
    numbers_ = numbers_buffer_.Get<int32_t>();
    short_slots_ = short_slots_buffer_.Get<int16_t>();
    pending_ = pending_buffer_.Get<uint8_t>();
    hit_ = hit_buffer_.Get<uint8_t>();
    number(numbers_, 0, tiling_.list_entries);
    AscendC::Duplicate(ids_, -1, positions);  // stays behind the ids of each token
    KVOFFLOAD_ORDER(V_MTE2);
  }

  __aicore__ inline void init_global(const PlanArguments& args) {
    topk_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args.topk));
    tags_gm_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args.tags));
    ages_gm_.SetGlobalBuffer(args.ages);
    hands_gm_.SetGlobalBuffer(args.hands);
    high_gm_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args.high));
    values_gm_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args.workspace + tiling_.values_offset));
    records_gm_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args.workspace + tiling_.records_offset));
    states_gm_.SetGlobalBuffer(args.workspace + tiling_.states_offset);
    empties_gm_.SetGlobalBuffer(args.workspace + tiling_.empties_offset);
  }

  __aicore__ inline void plan(int32_t n, int32_t part) {
    request_ = n;
    part_ = part;
    query_ = requests_.query(n);
    stable_ = requests_.seq_len(n) - query_;
    load_part();
    hit_positions_ = misses_ = new_ = duplicates_ = overflow_ = 0;
    for (int32_t t = 0; t < kMaxQueryTokens; ++t) new_slots_[t] = 0;
    find_empty();
    drop_unstable();
    for (int32_t t = 0; t < query_; ++t) mark_hits(t);
    const int32_t hits = count_hits();
    for (int32_t t = 0; t < query_; ++t) place_pending(t);
    write_record(hits);
    store_part();
  }

  __aicore__ inline uint64_t first_set() const {
    return static_cast<uint64_t>(requests_.row(request_)) * tiling_.sets + part_ * tiling_.part_sets;
  }

  __aicore__ inline void load_part() {
    KVOFFLOAD_ORDER(MTE3_MTE2);  // the part before on its way out
    const uint64_t slot = first_set() * tiling_.ways;
    load(tags_, tags_gm_, slot, part_slots_);
    load(states_, ages_gm_, slot, part_slots_);
    load(hands_buffer_.Get<uint8_t>(), hands_gm_, first_set(), tiling_.part_sets);
    load(high_buffer_.Get<int32_t>(), high_gm_, requests_.row(request_), 1);
    for (int32_t t = 0; t < query_; ++t) {
      load(ids_[t * tiling_.padded_width], topk_,
           static_cast<uint64_t>(requests_.first_token(request_) + t) * tiling_.width, tiling_.width);
    }
    KVOFFLOAD_ORDER(MTE2_S);
    KVOFFLOAD_ORDER(MTE2_V);
  }

  // One bit for each slot without a tag, so that a selection reads one word of them.
  __aicore__ inline void find_empty() {
    for (int32_t first = 0; first < part_slots_; first += kScanSlots) {
      AscendC::CompareScalar(empties_[first / 8], tags_[first], -1, AscendC::CMPMODE::EQ, kScanSlots);
    }
  }

  // Forgets residents at or beyond the stable prefix: their rows belong to rejected drafts (I-2).
  __aicore__ inline void drop_unstable() {
    const int32_t high = high_buffer_.Get<int32_t>().GetValue(0);
    const int64_t beyond = static_cast<int64_t>(high) - stable_;
    if (beyond <= 0) return;
    const int32_t last = beyond > tiling_.sets * tiling_.ways ? INT32_MAX : high - 1;
    for (int32_t first = 0; first < part_slots_; first += kScanSlots) {
      const uint64_t dropped = list_dropped(first, last);
      KVOFFLOAD_ORDER(V_S);
      for (uint64_t i = 0; i < dropped; ++i) {
        const int32_t slot = first + list_.GetValue(i);
        tags_.SetValue(slot, -1);
        sets_.drop(slot);
      }
      KVOFFLOAD_ORDER(S_V);
    }
  }

  // Numbers of the slots whose tag is in stable_ .. last.
  __aicore__ inline uint64_t list_dropped(int32_t first, int32_t last) {
    AscendC::LocalTensor<uint8_t> mask = dropped_buffer_.Get<uint8_t>();
    AscendC::LocalTensor<int32_t>& bounded = look_up_.spare0();
    AscendC::Maxs(bounded, tags_[first], stable_, kScanSlots);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Mins(bounded, bounded, last, kScanSlots);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Compare(mask, bounded, tags_[first], AscendC::CMPMODE::EQ, kScanSlots);
    AscendC::PipeBarrier<PIPE_V>();
    return pack(list_, numbers_, mask, kScanSlots);
  }

  // The elements whose mask bit is set move to the front of `to`; returns how many.
  __aicore__ inline uint64_t pack(const AscendC::LocalTensor<int32_t>& to, const AscendC::LocalTensor<int32_t>& from,
                                  const AscendC::LocalTensor<uint8_t>& mask, int32_t count) {
    uint64_t kept = 0;
    AscendC::GatherMask(to, from, mask.ReinterpretCast<uint32_t>(), true, count, {1, 1, 8, 8}, kept);
    return kept;
  }

  // I-3: all hits of the step are marked before any victim is chosen.
  __aicore__ inline void mark_hits(int32_t t) {
    const int32_t at = t * tiling_.padded_width;
    for (int32_t k = 0; k < tiling_.padded_width; k += kLookUpIds) {
      look_up_.run(tags_, ids_[at + k], stable_ + t, part_, hit_[k / 8], pending_[(at + k) / 8], values_[at + k]);
      AscendC::PipeBarrier<PIPE_V>();
    }
    const uint64_t hits = pack(list_, values_[at], hit_, tiling_.padded_width);
    hit_positions_ += static_cast<int32_t>(hits);
    if (hits == 0) return;
    // The slots in 16 bits: the scalar unit then reads four at a time.
    const int32_t before = plan_value(kHowHit, part_ * part_slots_);  // value of the part's first slot
    const int32_t count = static_cast<int32_t>(hits);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Adds(list_, list_, -before, count);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Cast(short_slots_, list_, AscendC::RoundMode::CAST_NONE, count);
    KVOFFLOAD_ORDER(V_S);
    const AscendC::LocalTensor<uint64_t> fours = short_slots_.ReinterpretCast<uint64_t>();
    for (int32_t i = 0; i < count / 4; ++i) {
      const uint64_t four = fours.GetValue(i);
      for (int32_t shift = 0; shift < 64; shift += 16) mark_hit(static_cast<int32_t>(four >> shift & 0xffff));
    }
    for (int32_t i = count / 4 * 4; i < count; ++i) mark_hit(short_slots_.GetValue(i));
    KVOFFLOAD_ORDER(S_V);
  }

  __aicore__ inline void mark_hit(int32_t slot) {
    if constexpr (kHitForgetsAge<P>) {
      sets_.set_byte(slot, kWayNeeded | P::kHitFloor);
    } else {
      const uint8_t byte = sets_.byte(slot);
      if ((byte & kWayNeeded) == 0) sets_.set_byte(slot, kWayNeeded | age_after_hit<P>(byte));
    }
  }

  // Slots hit: positions may share one. Sums the ways' needed bits, by bytes: 16384 slots give each of the
  // 128 bytes left 128 at most.
  __aicore__ inline int32_t count_hits() {
    AscendC::Duplicate(sums_, static_cast<uint16_t>(0), kLineBytes);
    AscendC::LocalTensor<uint16_t> states = states_.ReinterpretCast<uint16_t>();
    for (int32_t first = 0; first < part_slots_ / 2; first += kByteLanes) {
      AscendC::And(lanes_, states[first], needed_bits_, kByteLanes);
      AscendC::PipeBarrier<PIPE_V>();
      AscendC::ShiftRight(lanes_, lanes_, static_cast<uint16_t>(7), kByteLanes);
      AscendC::PipeBarrier<PIPE_V>();
      for (int32_t half = kByteLanes / 2; half >= kLineBytes; half /= 2) {
        add_lanes(lanes_, lanes_[half], half);
      }
      add_lanes(sums_, lanes_, kLineBytes);
    }
    KVOFFLOAD_ORDER(V_S);
    AscendC::LocalTensor<uint64_t> words = sums_.ReinterpretCast<uint64_t>();
    uint64_t hits = 0;
    for (int32_t i = 0; i < kLineBytes * 2 / 8; ++i) {
      const uint64_t word = words.GetValue(i);
      const uint64_t pairs = (word & 0x00ff00ff00ff00ffull) + ((word >> 8) & 0x00ff00ff00ff00ffull);
      hits += (pairs * 0x0001000100010001ull) >> 48;
    }
    return static_cast<int32_t>(hits);
  }

  __aicore__ inline void add_lanes(const AscendC::LocalTensor<uint16_t>& to,
                                   const AscendC::LocalTensor<uint16_t>& more, int32_t lanes) {
    AscendC::Add(to.ReinterpretCast<int16_t>(), to.ReinterpretCast<int16_t>(), more.ReinterpretCast<int16_t>(), lanes);
    AscendC::PipeBarrier<PIPE_V>();
  }

  // Ids that were not resident, in order of position: one placed before, or a way of their set.
  __aicore__ inline void place_pending(int32_t t) {
    const int32_t at = t * tiling_.padded_width;
    const uint64_t pending = pack(list_, numbers_, pending_[at / 8], tiling_.padded_width);
    if (pending == 0) return;
    pack(list_ids_, ids_[at], pending_[at / 8], tiling_.padded_width);
    KVOFFLOAD_ORDER(V_S);
    const AscendC::LocalTensor<uint64_t> positions = list_.ReinterpretCast<uint64_t>();  // half the reads
    const AscendC::LocalTensor<uint64_t> ids = list_ids_.ReinterpretCast<uint64_t>();
    for (uint64_t i = 0; i < pending / 2; ++i) {
      const uint64_t two_positions = positions.GetValue(i);
      const uint64_t two_ids = ids.GetValue(i);
      values_.SetValue(at + static_cast<int32_t>(two_positions), place(static_cast<int32_t>(two_ids)));
      values_.SetValue(at + static_cast<int32_t>(two_positions >> 32), place(static_cast<int32_t>(two_ids >> 32)));
    }
    if (pending % 2 != 0) values_.SetValue(at + list_.GetValue(pending - 1), place(list_ids_.GetValue(pending - 1)));
    KVOFFLOAD_ORDER(S_V);
  }

  // Returns the id's plan value.
  __aicore__ inline int32_t place(int32_t id) {
    const int32_t set = id & (tiling_.part_sets - 1);
    const int32_t before = part_ * part_slots_;
    SetStates::Set ways(sets_, set);
    const int32_t earlier = find_placed(set, ways.placed(), id);
    if (earlier != kNoWay) {
      ++duplicates_;
      return plan_value(kHowDuplicate, before + earlier);
    }
    const int32_t way = ways.take_way<P>();
    if (way == kNoWay) {
      ++overflow_;
      return plan_value(kHowOverflow, -1);
    }
    const int32_t slot = set * tiling_.ways + way;
    tags_.SetValue(slot, id);
    sets_.set_byte(slot, kWayNeeded | kWayPlaced | P::kNewAge);
    if (id < stable_) {
      ++misses_;
      return plan_value(kHowMiss, before + slot);
    }
    ++new_;
    new_slots_[id - stable_] = before + slot + 1;
    return plan_value(kHowNew, before + slot);
  }

  __aicore__ inline void write_record(int32_t hits) {
    record_.SetValue(kRecordHitPositions, hit_positions_);
    record_.SetValue(kRecordHits, hits);
    record_.SetValue(kRecordMisses, misses_);
    record_.SetValue(kRecordNew, new_);
    record_.SetValue(kRecordDuplicates, duplicates_);
    record_.SetValue(kRecordOverflow, overflow_);
    for (int32_t i = kRecordOverflow + 1; i < kRecordInts; ++i) {
      const int32_t t = i - kRecordNewSlots;
      record_.SetValue(i, t >= 0 && t < kMaxQueryTokens ? new_slots_[t] : 0);
    }
  }

  // Slot within the part of an id that this step placed, or kNoWay.
  __aicore__ inline int32_t find_placed(int32_t set, uint32_t ways, int32_t id) const {
    for (; ways != 0; ways &= ways - 1) {
      const int32_t slot = set * tiling_.ways + lowest_bit(ways);
      if (tags_.GetValue(slot) == id) return slot;
    }
    return kNoWay;
  }

  __aicore__ inline void store_part() {
    KVOFFLOAD_ORDER(S_MTE3);
    const uint64_t slot = first_set() * tiling_.ways;
    const uint64_t item = static_cast<uint64_t>(request_) * tiling_.parts + part_;
    store(tags_gm_, slot, tags_, part_slots_);
    store(hands_gm_, first_set(), hands_buffer_.Get<uint8_t>(), tiling_.part_sets);
    store(states_gm_, (static_cast<uint64_t>(request_) * tiling_.sets + part_ * tiling_.part_sets) * tiling_.ways,
          states_, part_slots_);
    store(empties_gm_, static_cast<uint64_t>(request_) * tiling_.sets * tiling_.ways / 8 + part_ * part_slots_ / 8,
          empties_, part_slots_ / 8);
    store(records_gm_, item * kRecordInts, record_, kRecordInts);
    for (int32_t t = 0; t < query_; ++t) {
      store(values_gm_, (item * tiling_.max_query + t) * tiling_.width, values_[t * tiling_.padded_width],
            tiling_.width);
    }
    store_ages(slot);
  }

  __aicore__ inline void store_ages(uint64_t first_slot) {
    constexpr int32_t kRound = kLookUpIds * kUbBlockBytes;  // bytes of the spare buffer
    AscendC::LocalTensor<uint16_t> states = states_.ReinterpretCast<uint16_t>();
    AscendC::LocalTensor<uint16_t> ages = look_up_.spare0().ReinterpretCast<uint16_t>();
    for (int32_t first = 0; first < part_slots_; first += kRound) {
      const int32_t bytes = part_slots_ - first < kRound ? part_slots_ - first : kRound;
      if (first > 0) {
        KVOFFLOAD_ORDER(MTE3_V);  // the round before on its way out
      }
      for (int32_t lane = 0; lane < bytes / 2; lane += kByteLanes) {
        AscendC::And(ages[lane], states[first / 2 + lane], age_bits_, kByteLanes);
      }
      KVOFFLOAD_ORDER(V_MTE3);
      store(ages_gm_, first_slot + first, ages.ReinterpretCast<uint8_t>(), bytes);
    }
  }

  PlanTiling tiling_;
  PlanRequests requests_;
  LookUp look_up_;
  SetStates sets_;
  AscendC::GlobalTensor<int32_t> topk_;
  AscendC::GlobalTensor<int32_t> tags_gm_;
  AscendC::GlobalTensor<uint8_t> ages_gm_;
  AscendC::GlobalTensor<uint8_t> hands_gm_;
  AscendC::GlobalTensor<int32_t> high_gm_;
  AscendC::GlobalTensor<int32_t> values_gm_;
  AscendC::GlobalTensor<int32_t> records_gm_;
  AscendC::GlobalTensor<uint8_t> states_gm_;
  AscendC::GlobalTensor<uint8_t> empties_gm_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> tags_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> states_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> hands_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> high_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> record_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> bytes_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> sums_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> ids_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> values_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> list_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> numbers_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> list_ids_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> short_slots_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> pending_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> hit_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> dropped_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> empties_buffer_;
  AscendC::LocalTensor<int32_t> tags_;
  AscendC::LocalTensor<uint8_t> states_;
  AscendC::LocalTensor<uint8_t> empties_;  // a bit for each slot
  AscendC::LocalTensor<int32_t> record_;
  AscendC::LocalTensor<uint16_t> age_bits_;
  AscendC::LocalTensor<uint16_t> needed_bits_;
  AscendC::LocalTensor<uint16_t> lanes_;
  AscendC::LocalTensor<uint16_t> sums_;
  AscendC::LocalTensor<int32_t> ids_;
  AscendC::LocalTensor<int32_t> values_;
  AscendC::LocalTensor<int32_t> list_;
  AscendC::LocalTensor<int32_t> list_ids_;  // ids of the list's positions
  AscendC::LocalTensor<int32_t> numbers_;   // 0, 1, 2, ...
  AscendC::LocalTensor<int16_t> short_slots_;
  AscendC::LocalTensor<uint8_t> pending_;
  AscendC::LocalTensor<uint8_t> hit_;
  int32_t part_slots_ = 0;
  int32_t request_ = 0;
  int32_t part_ = 0;
  int32_t query_ = 0;
  int32_t stable_ = 0;
  // Of the part that is being planned; the record's.
  int32_t hit_positions_ = 0;
  int32_t misses_ = 0;
  int32_t new_ = 0;
  int32_t duplicates_ = 0;
  int32_t overflow_ = 0;
  int32_t new_slots_[kMaxQueryTokens] = {};
};

}  // namespace kvoffload::ascendc
