// Looks up 256 ids in the sets of one part of a partition, with vector instructions only: the tags of the ids' sets are
// gathered eight at a time, compared with the ids, and the way of the match, if any, is what a reduction over numbered
// ways leaves. No scalar touches an id, and the scalar unit waits once for all rounds of a query token.
#pragma once

#include "../../common/numbers.h"
#include "../../common/order.h"
#include "plan_values.h"

namespace kvoffload::ascendc {

class LookUp {
 public:
  __aicore__ inline void init(AscendC::TPipe& pipe, const PlanTiling& tiling) {
    tiling_ = tiling;
    pipe.InitBuffer(gathered_buffer_, kLookUpIds * kUbBlockBytes);
    pipe.InitBuffer(ids_buffer_, kLookUpIds * kUbBlockBytes);
    pipe.InitBuffer(numbers_buffer_, kLookUpIds * kUbBlockBytes);
    pipe.InitBuffer(ints_buffer_, 7 * kLookUpIds * 4);
    pipe.InitBuffer(matches_buffer_, kLookUpIds);
    pipe.InitBuffer(masks_buffer_, 3 * kUbBlockBytes);
    gathered_ = gathered_buffer_.Get<int32_t>();
    broadcast_ = ids_buffer_.Get<int32_t>();
    numbers_ = numbers_buffer_.Get<float>();
    matches_ = matches_buffer_.Get<uint8_t>();
    AscendC::LocalTensor<int32_t> ints = ints_buffer_.Get<int32_t>();
    set_bits_ = ints;
    part_set_bits_ = ints[kLookUpIds];
    scratch_ = ints[2 * kLookUpIds];
    set_ = ints[3 * kLookUpIds];
    way_ = ints[4 * kLookUpIds].ReinterpretCast<float>();
    column_way_ = ints[5 * kLookUpIds].ReinterpretCast<float>();
    column_base_ = ints[6 * kLookUpIds].ReinterpretCast<float>();
    AscendC::LocalTensor<uint8_t> masks = masks_buffer_.Get<uint8_t>();
    own_ = masks;
    in_part_ = masks[kUbBlockBytes];
    missing_ = masks[2 * kUbBlockBytes];
    init_constants();
  }

  // Ids that a query token at `limit` may attend to and whose set is in part `part`: `hit` and `pending` get one bit
  // for each, 32 bytes; `values` their plan values, hits only, and 0 elsewhere.
  __aicore__ inline void run(const AscendC::LocalTensor<int32_t>& tags, const AscendC::LocalTensor<int32_t>& ids,
                             int32_t limit, int32_t part, const AscendC::LocalTensor<uint8_t>& hit,
                             const AscendC::LocalTensor<uint8_t>& pending,
                             const AscendC::LocalTensor<int32_t>& values) {
    find_own(ids, limit, part);
    find_ways(tags, ids);
    split(hit, pending);
    // The sets' first slots, then the ways; way_ counts from 1, as the values' slots do.
    AscendC::ShiftLeft(set_, set_, tiling_.way_bits, kLookUpIds);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Add(set_, set_, scratch_, kLookUpIds);
    AscendC::PipeBarrier<PIPE_V>();
    const int32_t base = part * tiling_.part_sets * tiling_.ways;
    AscendC::Adds(set_, set_, plan_value(kHowHit, base - 1), kLookUpIds);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Select(values.ReinterpretCast<float>(), hit, set_.ReinterpretCast<float>(), 0.0f,
                    AscendC::SELMODE::VSEL_TENSOR_SCALAR_MODE, kLookUpIds);
  }

  // 8 KiB for other uses between look-ups.
  __aicore__ inline AscendC::LocalTensor<int32_t>& spare0() { return gathered_; }

 private:
  static constexpr int32_t kLanes = kLookUpIds * 8;  // int32 of the big buffers: eight ways of each id
  static constexpr int32_t kRepeats = kLookUpIds / 8;

  __aicore__ inline void init_constants() {
    AscendC::Duplicate(set_bits_, tiling_.sets - 1, kLookUpIds);
    AscendC::Duplicate(part_set_bits_, tiling_.part_sets - 1, kLookUpIds);
    // 1 to 8 in each block.
    number(gathered_, 0, kLanes);
    AscendC::ShiftRight(broadcast_, gathered_, 3, kLanes);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::ShiftLeft(broadcast_, broadcast_, 3, kLanes);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Sub(gathered_, gathered_, broadcast_, kLanes);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Adds(gathered_, gathered_, 1, kLanes);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Cast(numbers_, gathered_, AscendC::RoundMode::CAST_NONE, kLanes);
  }

  __aicore__ inline void and_bits(const AscendC::LocalTensor<int32_t>& to, const AscendC::LocalTensor<int32_t>& a,
                                  const AscendC::LocalTensor<int32_t>& b) {
    AscendC::And(to.ReinterpretCast<uint16_t>(), a.ReinterpretCast<uint16_t>(), b.ReinterpretCast<uint16_t>(),
                 2 * kLookUpIds);
  }

  // own_: valid ids whose set is in the part. set_: their set within it.
  __aicore__ inline void find_own(const AscendC::LocalTensor<int32_t>& ids, int32_t limit, int32_t part) {
    AscendC::Maxs(scratch_, ids, 0, kLookUpIds);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Mins(scratch_, scratch_, limit, kLookUpIds);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Compare(own_, scratch_, ids, AscendC::CMPMODE::EQ, kLookUpIds);
    and_bits(set_, ids, set_bits_);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::ShiftRight(scratch_, set_, tiling_.part_set_bits, kLookUpIds);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::CompareScalar(in_part_, scratch_, part, AscendC::CMPMODE::EQ, kLookUpIds);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::And(own_.ReinterpretCast<uint16_t>(), own_.ReinterpretCast<uint16_t>(),
                 in_part_.ReinterpretCast<uint16_t>(), kLookUpIds / 16);
    and_bits(set_, ids, part_set_bits_);
    AscendC::PipeBarrier<PIPE_V>();
  }

  // scratch_: the way of each id in its set, from 1; 0 when it is not there. An id is there once at most.
  __aicore__ inline void find_ways(const AscendC::LocalTensor<int32_t>& tags,
                                   const AscendC::LocalTensor<int32_t>& ids) {
    AscendC::ShiftLeft(scratch_, set_, tiling_.way_bits + 2, kLookUpIds);  // bytes of the sets before
    AscendC::Brcb(broadcast_, ids, kRepeats, {1, 8});
    AscendC::PipeBarrier<PIPE_V>();
    for (int32_t first_way = 0; first_way < tiling_.ways; first_way += 8) {
      AscendC::Gatherb(gathered_.ReinterpretCast<uint32_t>(), tags[first_way].ReinterpretCast<uint32_t>(),
                       scratch_.ReinterpretCast<uint32_t>(), kRepeats, {1, 8});
      AscendC::PipeBarrier<PIPE_V>();
      AscendC::Compare(matches_, gathered_, broadcast_, AscendC::CMPMODE::EQ, kLanes);
      AscendC::PipeBarrier<PIPE_V>();
      AscendC::Select(gathered_.ReinterpretCast<float>(), matches_, numbers_, 0.0f,
                      AscendC::SELMODE::VSEL_TENSOR_SCALAR_MODE, kLanes);
      AscendC::PipeBarrier<PIPE_V>();
      reduce_column(first_way);
    }
    AscendC::Cast(scratch_, way_, AscendC::RoundMode::CAST_RINT, kLookUpIds);
    AscendC::PipeBarrier<PIPE_V>();
  }

  // The greatest number of each block, plus first_way where there is one.
  __aicore__ inline void reduce_column(int32_t first_way) {
    if (first_way == 0) {
      AscendC::BlockReduceMax(way_, gathered_.ReinterpretCast<float>(), kRepeats, 64, 1, 1, 8);
      AscendC::PipeBarrier<PIPE_V>();
      return;
    }
    AscendC::BlockReduceMax(column_way_, gathered_.ReinterpretCast<float>(), kRepeats, 64, 1, 1, 8);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Mins(column_base_, column_way_, 1.0f, kLookUpIds);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Muls(column_base_, column_base_, static_cast<float>(first_way), kLookUpIds);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Add(column_way_, column_way_, column_base_, kLookUpIds);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Max(way_, way_, column_way_, kLookUpIds);
    AscendC::PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void split(const AscendC::LocalTensor<uint8_t>& hit, const AscendC::LocalTensor<uint8_t>& pending) {
    AscendC::CompareScalar(missing_, scratch_, 0, AscendC::CMPMODE::EQ, kLookUpIds);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::And(pending.ReinterpretCast<uint16_t>(), own_.ReinterpretCast<uint16_t>(),
                 missing_.ReinterpretCast<uint16_t>(), kLookUpIds / 16);
    AscendC::Not(in_part_.ReinterpretCast<uint16_t>(), missing_.ReinterpretCast<uint16_t>(), kLookUpIds / 16);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::And(hit.ReinterpretCast<uint16_t>(), own_.ReinterpretCast<uint16_t>(),
                 in_part_.ReinterpretCast<uint16_t>(), kLookUpIds / 16);
  }

  PlanTiling tiling_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> gathered_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> ids_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> numbers_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> ints_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> matches_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> masks_buffer_;
  AscendC::LocalTensor<int32_t> gathered_;       // eight tags of each id's set
  AscendC::LocalTensor<int32_t> broadcast_;      // each id, eight times
  AscendC::LocalTensor<float> numbers_;          // 1 to 8, for each id
  AscendC::LocalTensor<uint8_t> matches_;        // a byte for each id
  AscendC::LocalTensor<int32_t> set_bits_;       // S - 1
  AscendC::LocalTensor<int32_t> part_set_bits_;  // sets of a part - 1
  AscendC::LocalTensor<int32_t> scratch_;
  AscendC::LocalTensor<int32_t> set_;
  AscendC::LocalTensor<float> way_;
  AscendC::LocalTensor<float> column_way_;
  AscendC::LocalTensor<float> column_base_;
  AscendC::LocalTensor<uint8_t> own_;
  AscendC::LocalTensor<uint8_t> in_part_;
  AscendC::LocalTensor<uint8_t> missing_;
};

}  // namespace kvoffload::ascendc
