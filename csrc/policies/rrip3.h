// RRIP with three bits, where a hit lowers the age by two only: rows that are hit often stay longest.
#pragma once

#include "policy.h"

namespace kvoffload {
namespace {

struct Rrip3 {
  static constexpr int kAgeBits = 3;
  static constexpr std::uint8_t kNewAge = 6;
  static constexpr std::uint8_t kHitLowers = 2;
  static constexpr std::uint8_t kHitFloor = 0;

  template <class Ages>
  static KVOFFLOAD_POLICY_CODE int victim(Ages& ages, std::uint32_t unneeded, int hand) {
    return age_and_take_oldest<kAgeBits>(ages, unneeded, hand);
  }
};

}  // namespace
}  // namespace kvoffload
