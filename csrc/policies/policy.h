// Parameters of a replacement policy, on the CPU (csrc/cpu) and on the NPU (csrc/ascendc) alike. The meaning is that of
// the module of the same name in vllm_kvoffload/policies.
//
// A policy is a struct with
//   kAgeBits                bits of state of each slot, its age: 0 to kMaxAgeBits
//   kNewAge                 age of a row that was just placed
//   kHitLowers, kHitFloor   a hit lowers a row's age by kHitLowers, but not below kHitFloor; once per step, however many
//                           query tokens selected the row. kHitLowers is kToFloor where the age before does not matter
//   victim(ages, unneeded, hand)
//                           the way that is replaced: one of `unneeded` (a mask of the ways that the step does not
//                           need, never 0). The hand stands behind the last victim and moves behind this one. May
//                           change the ages of unneeded ways
// `ages` is a view of the ages of one set's ways, with
//   with_bit<kBit>()          mask of the ways whose age has that bit
//   set(ways, age)            ages of `ways` become `age`
//   add(ways, more)           ages of `ways` grow by `more`
//   first_from(ways, hand)    the first of `ways` at or after the hand, going round
//
// AscendC compiles this as device code, csrc/cpu once for each instruction set: hence no library but <cstdint>, and
// internal linkage (see plan_kernel.h).
#pragma once

#include <cstdint>

#ifndef KVOFFLOAD_POLICY_CODE
#define KVOFFLOAD_POLICY_CODE inline  // set_state.h of csrc/ascendc has its own
#endif

namespace kvoffload {
namespace {

constexpr int kMaxAgeBits = 5;            // the other bits of a byte are the AscendC kernel's
constexpr std::uint8_t kToFloor = 0xff;

// All ones when `mask` is zero, else zero: arithmetic, where a comparison would end up as a branch.
KVOFFLOAD_POLICY_CODE std::uint32_t all_if_zero(std::uint32_t mask) {
  return static_cast<std::uint32_t>((static_cast<std::int64_t>(mask) - 1) >> 63);
}

template <class P>
constexpr bool kHitChangesAge = P::kHitLowers != 0 || P::kHitFloor != 0;
template <class P>
constexpr bool kHitForgetsAge = P::kHitLowers == kToFloor;

template <class P>
KVOFFLOAD_POLICY_CODE std::uint8_t age_after_hit(std::uint8_t age) {
  if constexpr (kHitForgetsAge<P>) return P::kHitFloor;
  const int lowered = int{age} - P::kHitLowers;
  return static_cast<std::uint8_t>(lowered > P::kHitFloor ? lowered : P::kHitFloor);
}

struct Oldest {
  std::uint32_t ways;   // those with the greatest age
  std::uint32_t lacks;  // how much it is below the greatest age that kBits can say
};

// The oldest of `among`, bit by bit from the highest. The caller passes all ways in question and 0.
template <int kBits, class Ages>
KVOFFLOAD_POLICY_CODE Oldest oldest(const Ages& ages, Oldest among) {
  const std::uint32_t with = ages.template with_bit<kBits - 1>() & among.ways;
  const std::uint32_t none = all_if_zero(with);
  const Oldest found{with | (among.ways & none), among.lacks | (none & (1u << (kBits - 1)))};
  if constexpr (kBits == 1) {
    return found;
  } else {
    return oldest<kBits - 1>(ages, found);
  }
}

// All of `ways` age together until one has the greatest age; the first such from the hand on.
template <int kBits, class Ages>
KVOFFLOAD_POLICY_CODE int age_and_take_oldest(Ages& ages, std::uint32_t ways, int hand) {
  const Oldest found = oldest<kBits>(ages, {ways, 0});
  ages.add(ways, static_cast<std::uint8_t>(found.lacks));
  return ages.first_from(found.ways, hand);
}

}  // namespace
}  // namespace kvoffload
