// One set's ways as bytes, and the choice of a way. Scalar arithmetic on eight ways at a time: a set's bytes are two or
// four words, so that a choice costs some dozens of instructions and no vector set-up.
//
// A way's byte: the policy's age in bits 0 and 1, and what this step knows of it.
#pragma once

#include "dsa_plan_tiling_data.h"
#include "kernel_operator.h"

namespace kvoffload::ascendc {

constexpr uint8_t kAgeBits = 0x03;
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

// The sets of a row or of a part of it: bytes of the ways, and the hands.
class SetStates {
 public:
  __aicore__ inline void init(const AscendC::LocalTensor<uint8_t>& ways, const AscendC::LocalTensor<uint8_t>& hands,
                              int32_t way_bits, int32_t policy) {
    bytes_ = ways;
    words_ = ways.ReinterpretCast<uint64_t>();
    hands_ = hands;
    way_bits_ = way_bits;
    way_count_ = 1 << way_bits;
    policy_ = policy;
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
  __aicore__ inline int32_t take_way(int32_t set) {
    const uint32_t unneeded = ~ways_with(set, 7) & all_ways();
    if (unneeded == 0) return kNoWay;
    const uint32_t empty = ways_with(set, 5) & unneeded;
    if (empty != 0) return lowest_bit(empty);
    const int32_t hand = hands_.GetValue(set) & (way_count_ - 1);
    int32_t way = 0;
    if (policy_ == kFifo) {
      way = first_from(unneeded, hand);
    } else if (policy_ == kClock) {
      way = clock_victim(set, unneeded, hand);
    } else {
      way = rrip_victim(set, unneeded, hand);
    }
    hands_.SetValue(set, static_cast<uint8_t>((way + 1) & (way_count_ - 1)));
    return way;
  }

 private:
  __aicore__ inline uint32_t all_ways() const { return way_count_ == 32 ? 0xffffffffu : 0xffffu; }
  __aicore__ inline uint64_t word(int32_t set, int32_t w) const {
    return words_.GetValue((set << way_bits_) / 8 + w);
  }

  // First bit at or after `from`, going round.
  __aicore__ inline int32_t first_from(uint32_t mask, int32_t from) const {
    const uint64_t doubled = (static_cast<uint64_t>(mask) << way_count_) | mask;
    return (from + lowest_bit(doubled >> from)) & (way_count_ - 1);
  }

  // Second chance: the hand passes ways whose bit is set, clearing it; after a full round it takes the first.
  __aicore__ inline int32_t clock_victim(int32_t set, uint32_t unneeded, int32_t hand) {
    const uint32_t unreferenced = ~ways_with(set, 0) & unneeded;
    if (unreferenced == 0) {
      clear_ages(set, unneeded);
      return first_from(unneeded, hand);
    }
    const int32_t way = first_from(unreferenced, hand);
    const uint32_t below_way = (1u << way) - 1;
    const uint32_t from_hand = ~((1u << hand) - 1);
    clear_ages(set, (way >= hand ? below_way & from_hand : below_way | from_hand) & unneeded);
    return way;
  }

  // All unneeded ways age together until one is at 3.
  __aicore__ inline int32_t rrip_victim(int32_t set, uint32_t unneeded, int32_t hand) {
    const uint32_t high = ways_with(set, 1) & unneeded;
    const uint32_t low = ways_with(set, 0) & unneeded;
    uint32_t oldest = high & low;
    uint64_t lacks = 0;
    if (oldest == 0) {
      lacks = high != 0 ? 1 : (low != 0 ? 2 : 3);
      oldest = high != 0 ? high : (low != 0 ? low : unneeded);
      for (int32_t w = 0; w < way_count_ / 8; ++w) {
        put_word(set, w, word(set, w) + lacks * spread_bits((unneeded >> (8 * w)) & 0xff));
      }
    }
    return first_from(oldest, hand);
  }

  __aicore__ inline void clear_ages(int32_t set, uint32_t ways) {
    for (int32_t w = 0; w < way_count_ / 8; ++w) {
      const uint64_t bytes = spread_bits((ways >> (8 * w)) & 0xff);
      if (bytes != 0) put_word(set, w, word(set, w) & ~(bytes * kAgeBits));
    }
  }

  __aicore__ inline void put_word(int32_t set, int32_t w, uint64_t value) {
    words_.SetValue((set << way_bits_) / 8 + w, value);
  }

  AscendC::LocalTensor<uint8_t> bytes_;
  AscendC::LocalTensor<uint64_t> words_;
  AscendC::LocalTensor<uint8_t> hands_;
  int32_t way_bits_ = 4;
  int32_t way_count_ = 16;
  int32_t policy_ = kFifo;
};

}  // namespace kvoffload::ascendc
