// Static RRIP with two bits: a hit makes a row young, a new row starts nearly old.
#pragma once

#include "policy.h"

namespace kvoffload {
namespace {

struct Rrip {
  static constexpr int kAgeBits = 2;
  static constexpr std::uint8_t kNewAge = 2;
  static constexpr std::uint8_t kHitLowers = kToFloor;
  static constexpr std::uint8_t kHitFloor = 0;

  template <class Ages>
  static KVOFFLOAD_POLICY_CODE int victim(Ages& ages, std::uint32_t unneeded, int hand) {
    return age_and_take_oldest<kAgeBits>(ages, unneeded, hand);
  }
};

}  // namespace
}  // namespace kvoffload
