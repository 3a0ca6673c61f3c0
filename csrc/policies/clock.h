// Second chance: a hit sets a slot's bit; the hand passes ways whose bit is set, clearing it.
#pragma once

#include "policy.h"

namespace kvoffload {
namespace {

struct Clock {
  static constexpr int kAgeBits = 1;
  static constexpr std::uint8_t kNewAge = 0;
  static constexpr std::uint8_t kHitLowers = kToFloor;
  static constexpr std::uint8_t kHitFloor = 1;

  // When all bits are set, a full round clears them and the hand takes the first way.
  template <class Ages>
  static KVOFFLOAD_POLICY_CODE int victim(Ages& ages, std::uint32_t unneeded, int hand) {
    const std::uint32_t clear = ~ages.template with_bit<0>() & unneeded;
    if (clear == 0) {
      ages.set(unneeded, 0);
      return ages.first_from(unneeded, hand);
    }
    const int way = ages.first_from(clear, hand);
    const std::uint32_t before_way = (1u << way) - 1;
    const std::uint32_t from_hand = ~((1u << hand) - 1);
    ages.set((way >= hand ? before_way & from_hand : before_way | from_hand) & unneeded, 0);
    return way;
  }
};

}  // namespace
}  // namespace kvoffload
