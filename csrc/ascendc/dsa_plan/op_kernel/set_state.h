// One set's ways as bytes, and the selection of a way. Scalar arithmetic on eight ways at a time: a set's bytes are two
// or four words, so that a selection costs some dozens of instructions and no vector set-up.
//
// A way's byte: the policy's age in the lower bits, this step's flags in the upper ones.
#pragma once

#include "dsa_plan_tiling_data.h"
#include "kernel_operator.h"

#define KVOFFLOAD_POLICY_CODE __aicore__ inline
#include "../../../policies/policies.h"

namespace kvoffload::ascendc {

constexpr uint8_t kAgeMask = (1 << kMaxAgeBits) - 1;
constexpr uint8_t kWayPlaced = 0x40;  // got its tag from this step
constexpr uint8_t kWayNeeded = 0x80;  // this step reads or fills it
constexpr int32_t kNoWay = -1;
constexpr uint64_t kByteOnes = 0x0101010101010101ull;

// Bit i of the result is bit `bit` of byte i.
__aicore__ inline uint32_t pack_bit(uint64_t word, int32_t bit) {
  return static_cast<uint32_t>((((word >> bit) & kByteOnes) * 0x0102040810204080ull) >> 56);
}

// Byte i of the result is bit i of `bits`, 0 or 1.
__aicore__ inline uint64_t spread_bits(uint32_t bits) {
  const uint64_t single = (bits * kByteOnes) & 0x8040201008040201ull;
  return ((single + 0x7f7f7f7f7f7f7f7full) >> 7) & kByteOnes;
}

__aicore__ inline int32_t lowest_bit(uint64_t mask) {
  return static_cast<int32_t>(AscendC::ScalarGetSFFValue<1>(mask));
}

// The sets of a partition or of a part of it: bytes of the ways, the hands, and one bit for each way without a tag.
class SetStates {
 public:
  __aicore__ inline void init(const AscendC::LocalTensor<uint8_t>& ways, const AscendC::LocalTensor<uint8_t>& hands,
                              const AscendC::LocalTensor<uint8_t>& empties, int32_t way_bits) {
    bytes_ = ways;
    words_ = ways.ReinterpretCast<uint64_t>();
    hands_ = hands;
    empties_ = empties;
    way_bits_ = way_bits;
    way_count_ = 1 << way_bits;
  }

  __aicore__ inline void set_byte(int32_t slot, uint8_t value) { bytes_.SetValue(slot, value); }
  __aicore__ inline uint8_t byte(int32_t slot) const { return bytes_.GetValue(slot); }

  // A slot loses its tag.
  __aicore__ inline void drop(int32_t slot) {
    bytes_.SetValue(slot, 0);
    empties_.SetValue(slot / 8, static_cast<uint8_t>(empties_.GetValue(slot / 8) | (1u << (slot % 8))));
  }

  // The ways of one set, read once. Is out of date after set_byte or drop.
  class Set {
   public:
    __aicore__ inline Set(SetStates& sets, int32_t set) : sets_(sets), set_(set), first_((set << sets.way_bits_) / 8) {
      for (int32_t w = 0; w < count(); ++w) words_[w] = sets.words_.GetValue(first_ + w);
    }

    // Ways whose byte has that bit.
    __aicore__ inline uint32_t ways_with(int32_t bit) const {
      uint32_t ways = 0;
      for (int32_t w = 0; w < count(); ++w) ways |= pack_bit(words_[w], bit) << (8 * w);
      return ways;
    }
    __aicore__ inline uint32_t placed() const { return ways_with(6); }

    // The lowest empty way that the step does not need, else the policy's victim; kNoWay when it needs all. The caller
    // writes the way's byte.
    template <class P>
    __aicore__ inline int32_t take_way() {
      const uint32_t unneeded = ~ways_with(7) & all_ways();
      if (unneeded == 0) return kNoWay;
      const uint32_t empty = empties() & unneeded;
      if (empty != 0) return lowest_bit(empty);
      const int32_t last = sets_.way_count_ - 1;
      const int32_t hand = sets_.hands_.GetValue(set_) & last;
      const int32_t way = P::victim(*this, unneeded, hand);
      sets_.hands_.SetValue(set_, static_cast<uint8_t>((way + 1) & last));
      return way;
    }

    // A policy's view of the ages, see csrc/policies/policy.h.

    template <int kBit>
    __aicore__ inline uint32_t with_bit() const {
      return ways_with(kBit);
    }
    __aicore__ inline void set(uint32_t ways, uint8_t age) {
      for (int32_t w = 0; w < count(); ++w) {
        const uint64_t bytes = spread_bits((ways >> (8 * w)) & 0xff);
        if (bytes != 0) put(w, (words_[w] & ~(bytes * kAgeMask)) + bytes * age);
      }
    }
    __aicore__ inline void add(uint32_t ways, uint8_t more) {
      if (more == 0) return;
      for (int32_t w = 0; w < count(); ++w) put(w, words_[w] + more * spread_bits((ways >> (8 * w)) & 0xff));
    }
    // First bit at or after `from`, going round.
    __aicore__ inline int32_t first_from(uint32_t ways, int32_t from) const {
      const uint64_t doubled = (static_cast<uint64_t>(ways) << sets_.way_count_) | ways;
      return (from + lowest_bit(doubled >> from)) & (sets_.way_count_ - 1);
    }

   private:
    __aicore__ inline int32_t count() const { return sets_.way_count_ / 8; }
    __aicore__ inline uint32_t all_ways() const { return sets_.way_count_ == 32 ? 0xffffffffu : 0xffffu; }
    // Ways placed by this step have their bit still, but are needed.
    __aicore__ inline uint32_t empties() const {
      if (sets_.way_count_ == 32) return sets_.empties_.template ReinterpretCast<uint32_t>().GetValue(set_);
      return sets_.empties_.template ReinterpretCast<uint16_t>().GetValue(set_);
    }
    __aicore__ inline void put(int32_t w, uint64_t value) {
      words_[w] = value;
      sets_.words_.SetValue(first_ + w, value);
    }

    SetStates& sets_;
    const int32_t set_;
    const int32_t first_;
    uint64_t words_[4];
  };

 private:
  AscendC::LocalTensor<uint8_t> bytes_;
  AscendC::LocalTensor<uint64_t> words_;
  AscendC::LocalTensor<uint8_t> hands_;
  AscendC::LocalTensor<uint8_t> empties_;
  int32_t way_bits_ = 4;
  int32_t way_count_ = 16;
};

}  // namespace kvoffload::ascendc
