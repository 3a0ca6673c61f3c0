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
constexpr uint8_t kWayEmpty = 0x20;   // no tag
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

// The sets of a partition or of a part of it: bytes of the ways, and the hands.
class SetStates {
 public:
  __aicore__ inline void init(const AscendC::LocalTensor<uint8_t>& ways, const AscendC::LocalTensor<uint8_t>& hands,
                              int32_t way_bits) {
    bytes_ = ways;
    words_ = ways.ReinterpretCast<uint64_t>();
    hands_ = hands;
    way_bits_ = way_bits;
    way_count_ = 1 << way_bits;
  }

  __aicore__ inline void set_byte(int32_t slot, uint8_t value) { bytes_.SetValue(slot, value); }
  __aicore__ inline uint8_t byte(int32_t slot) const { return bytes_.GetValue(slot); }

  // Ways of `set` whose byte has that bit.
  __aicore__ inline uint32_t ways_with(int32_t set, int32_t bit) const {
    uint32_t ways = 0;
    for (int32_t w = 0; w < way_count_ / 8; ++w) ways |= pack_bit(word(set, w), bit) << (8 * w);
    return ways;
  }

  __aicore__ inline uint32_t placed(int32_t set) const { return ways_with(set, 6); }

  // The lowest empty way that the step does not need, else the policy's victim; kNoWay when it needs all. The caller
  // writes the way's byte.
  template <class P>
  __aicore__ inline int32_t take_way(int32_t set) {
    const uint32_t unneeded = ~ways_with(set, 7) & all_ways();
    if (unneeded == 0) return kNoWay;
    const uint32_t empty = ways_with(set, 5) & unneeded;
    if (empty != 0) return lowest_bit(empty);
    const int32_t hand = hands_.GetValue(set) & (way_count_ - 1);
    Ages ages(*this, set);
    const int32_t way = P::victim(ages, unneeded, hand);
    hands_.SetValue(set, static_cast<uint8_t>((way + 1) & (way_count_ - 1)));
    return way;
  }

 private:
  // A policy's view of a set, see csrc/policies/policy.h.
  class Ages {
   public:
    __aicore__ inline Ages(SetStates& sets, int32_t set) : sets_(sets), set_(set) {}

    template <int kBit>
    __aicore__ inline uint32_t with_bit() const {
      return sets_.ways_with(set_, kBit);
    }
    __aicore__ inline void set(uint32_t ways, uint8_t age) {
      for (int32_t w = 0; w < sets_.way_count_ / 8; ++w) {
        const uint64_t bytes = spread_bits((ways >> (8 * w)) & 0xff);
        if (bytes != 0) sets_.put_word(set_, w, (sets_.word(set_, w) & ~(bytes * kAgeMask)) + bytes * age);
      }
    }
    __aicore__ inline void add(uint32_t ways, uint8_t more) {
      if (more == 0) return;
      for (int32_t w = 0; w < sets_.way_count_ / 8; ++w) {
        sets_.put_word(set_, w, sets_.word(set_, w) + more * spread_bits((ways >> (8 * w)) & 0xff));
      }
    }
    __aicore__ inline int32_t first_from(uint32_t ways, int32_t hand) const { return sets_.first_from(ways, hand); }

   private:
    SetStates& sets_;
    const int32_t set_;
  };

  __aicore__ inline uint32_t all_ways() const { return way_count_ == 32 ? 0xffffffffu : 0xffffu; }
  __aicore__ inline uint64_t word(int32_t set, int32_t w) const {
    return words_.GetValue((set << way_bits_) / 8 + w);
  }

  // First bit at or after `from`, going round.
  __aicore__ inline int32_t first_from(uint32_t mask, int32_t from) const {
    const uint64_t doubled = (static_cast<uint64_t>(mask) << way_count_) | mask;
    return (from + lowest_bit(doubled >> from)) & (way_count_ - 1);
  }

  __aicore__ inline void put_word(int32_t set, int32_t w, uint64_t value) {
    words_.SetValue((set << way_bits_) / 8 + w, value);
  }

  AscendC::LocalTensor<uint8_t> bytes_;
  AscendC::LocalTensor<uint64_t> words_;
  AscendC::LocalTensor<uint8_t> hands_;
  int32_t way_bits_ = 4;
  int32_t way_count_ = 16;
};

}  // namespace kvoffload::ascendc
