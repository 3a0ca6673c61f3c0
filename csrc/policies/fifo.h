// First in, first out: hits change nothing.
#pragma once

#include "policy.h"

namespace kvoffload {
namespace {

struct Fifo {
  static constexpr int kAgeBits = 0;
  static constexpr std::uint8_t kNewAge = 0;
  static constexpr std::uint8_t kHitLowers = 0;
  static constexpr std::uint8_t kHitFloor = 0;

  template <class Ages>
  static KVOFFLOAD_POLICY_CODE int victim(Ages& ages, std::uint32_t unneeded, int hand) {
    return ages.first_from(unneeded, hand);
  }
};

}  // namespace
}  // namespace kvoffload
