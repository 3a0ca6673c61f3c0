// The kinds of top-k positions, for compact delivery: (kind, number) pairs as dsa_serve_compact reads them.
#pragma once

#include "../../common/copy.h"
#include "../../common/numbers.h"
#include "../../common/order.h"
#include "plan_values.h"

namespace kvoffload::ascendc {

class PlanKinds {
 public:
  __aicore__ inline void init(AscendC::TPipe& pipe, const PlanArguments& args, const PlanTiling& tiling) {
    tiling_ = tiling;
    kinds_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args.kinds));
    pipe.InitBuffer(buffer_, 11 * kRound * 4);
    pipe.InitBuffer(masks_buffer_, 2 * kRound / 8);
    AscendC::LocalTensor<int32_t> ints = buffer_.Get<int32_t>();
    planes_ = ints;
    offsets_ = ints[2 * kRound];
    pairs_ = ints[4 * kRound];
    absent_ = ints[6 * kRound];
    bounded_ = ints[8 * kRound];
    kind_ = ints[9 * kRound].ReinterpretCast<float>();
    AscendC::LocalTensor<uint8_t> masks = masks_buffer_.Get<uint8_t>();
    mask_ = masks;
    not_hit_ = masks[kRound / 8];
    init_constants(ints[10 * kRound]);
  }

  // A token without a plan: pairs of (0, -1).
  __aicore__ inline void leave_out(int32_t token) {
    for (int32_t first = 0; first < tiling_.width; first += kRound) put(token, first, absent_);
  }

  // `ids`, `how` and `slots`: of the token's positions.
  __aicore__ inline void write(int32_t token, const AscendC::LocalTensor<int32_t>& ids,
                               const AscendC::LocalTensor<int32_t>& how, const AscendC::LocalTensor<int32_t>& slots,
                               int32_t stable, int32_t limit) {
    for (int32_t first = 0; first < tiling_.width; first += kRound) {
      describe(ids[first], how[first], slots[first], stable, limit);
      AscendC::Gather(pairs_, planes_, offsets_.ReinterpretCast<uint32_t>(), 0, 2 * kRound);
      KVOFFLOAD_ORDER(V_MTE3);
      put(token, first, pairs_);
      KVOFFLOAD_ORDER(MTE3_V);
    }
  }

 private:
  static constexpr int32_t kRound = kLookUpIds;
  static constexpr int32_t kPlaneBits = 10;  // log2 of the bytes of a round's int32
  static_assert((1 << kPlaneBits) == kRound * 4, "a plane holds one round");
  static constexpr float kPoolHit = 1;  // see vllm_kvoffload/ops/types.py
  static constexpr float kOldMiss = 2;
  static constexpr float kDecodeWindow = 3;
  static constexpr float kFutureSkip = 4;
  static constexpr float kNegativeStop = 5;

  // Pair i is elements i of the two planes: byte offsets that alternate between them.
  __aicore__ inline void init_constants(const AscendC::LocalTensor<int32_t>& scratch) {
    for (int32_t half = 0; half < 2; ++half) {
      AscendC::LocalTensor<int32_t> offsets = offsets_[half * kRound];
      number(offsets, half * kRound, kRound);
      AscendC::ShiftRight(scratch, offsets, 1, kRound);  // i
      AscendC::PipeBarrier<PIPE_V>();
      AscendC::ShiftLeft(bounded_, scratch, 1, kRound);
      AscendC::PipeBarrier<PIPE_V>();
      AscendC::Sub(offsets, offsets, bounded_, kRound);  // plane
      AscendC::PipeBarrier<PIPE_V>();
      AscendC::ShiftLeft(bounded_, offsets, kPlaneBits, kRound);
      AscendC::ShiftLeft(scratch, scratch, 2, kRound);
      AscendC::PipeBarrier<PIPE_V>();
      AscendC::Add(offsets, bounded_, scratch, kRound);
    }
    AscendC::Duplicate(planes_, 0, kRound);
    AscendC::Duplicate(planes_[kRound], -1, kRound);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Gather(absent_, planes_, offsets_.ReinterpretCast<uint32_t>(), 0, 2 * kRound);
  }

  // Sets the kind to `kind` where the bit of `mask` is not set.
  __aicore__ inline void unless(const AscendC::LocalTensor<uint8_t>& mask, float kind) {
    AscendC::Select(kind_, mask, kind_, kind, AscendC::SELMODE::VSEL_TENSOR_SCALAR_MODE, kRound);
    AscendC::PipeBarrier<PIPE_V>();
  }

  // mask_: where bounded_ equals the id, i.e. the id is within bounds.
  __aicore__ inline void within(const AscendC::LocalTensor<int32_t>& ids) {
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Compare(mask_, bounded_, ids, AscendC::CMPMODE::EQ, kRound);
    AscendC::PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void describe(const AscendC::LocalTensor<int32_t>& ids, const AscendC::LocalTensor<int32_t>& how,
                                  const AscendC::LocalTensor<int32_t>& slots, int32_t stable, int32_t limit) {
    AscendC::Duplicate(kind_, kDecodeWindow, kRound);
    AscendC::Maxs(bounded_, ids, stable, kRound);
    within(ids);
    unless(mask_, kOldMiss);
    AscendC::CompareScalar(mask_, how, kHowHit, AscendC::CMPMODE::EQ, kRound);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Not(not_hit_.ReinterpretCast<uint16_t>(), mask_.ReinterpretCast<uint16_t>(), kRound / 16);
    AscendC::PipeBarrier<PIPE_V>();
    unless(not_hit_, kPoolHit);
    AscendC::Mins(bounded_, ids, limit, kRound);
    within(ids);
    unless(mask_, kFutureSkip);
    AscendC::Maxs(bounded_, ids, 0, kRound);
    within(ids);
    unless(mask_, kNegativeStop);
    AscendC::Cast(planes_, kind_, AscendC::RoundMode::CAST_RINT, kRound);
    AscendC::Select(planes_[kRound].ReinterpretCast<float>(), not_hit_, ids.ReinterpretCast<float>(),
                    slots.ReinterpretCast<float>(), AscendC::SELMODE::VSEL_TENSOR_TENSOR_MODE, kRound);
    AscendC::PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void put(int32_t token, int32_t first, const AscendC::LocalTensor<int32_t>& pairs) {
    const int32_t count = tiling_.width - first < kRound ? tiling_.width - first : kRound;
    store(kinds_, (static_cast<uint64_t>(token) * tiling_.width + first) * 2, pairs, 2 * count);
  }

  PlanTiling tiling_;
  AscendC::GlobalTensor<int32_t> kinds_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> masks_buffer_;
  AscendC::LocalTensor<int32_t> planes_;   // kinds, then numbers
  AscendC::LocalTensor<int32_t> offsets_;  // into the planes
  AscendC::LocalTensor<int32_t> pairs_;
  AscendC::LocalTensor<int32_t> absent_;  // pairs of a token without a plan
  AscendC::LocalTensor<int32_t> bounded_;
  AscendC::LocalTensor<float> kind_;
  AscendC::LocalTensor<uint8_t> mask_;
  AscendC::LocalTensor<uint8_t> not_hit_;
};

}  // namespace kvoffload::ascendc
