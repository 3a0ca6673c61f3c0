// Shared code of the vector primitives of all instruction sets. Internal linkage, as in plan_kernel.h.
#pragma once

#include <cstdint>

#include "../policies/policy.h"

namespace kvoffload {
namespace {

constexpr std::int32_t kNoSlot = -1;

// The primitives of plan_kernel.h on the ways of a set; each instruction set has its own.
template <int W>
struct Lanes;

// The same on two sets of H ways each, those of the second set numbered from H on.
template <int H>
struct Pair {
  static std::uint32_t match(const std::int32_t* first, const std::int32_t* second, std::int32_t id) {
    return Lanes<H>::match(first, id) | Lanes<H>::match(second, id) << H;
  }
  static std::uint32_t zero(const std::uint8_t* first, const std::uint8_t* second) {
    return Lanes<H>::zero(first) | Lanes<H>::zero(second) << H;
  }
  template <int kBit>
  static std::uint32_t with_bit(const std::uint8_t* first, const std::uint8_t* second) {
    return Lanes<H>::template with_bit<kBit>(first) | Lanes<H>::template with_bit<kBit>(second) << H;
  }
  static void fill(std::uint8_t* first, std::uint8_t* second, std::uint32_t ways, std::uint8_t value) {
    Lanes<H>::fill(first, ways & kFirst, value);
    Lanes<H>::fill(second, ways >> H, value);
  }
  static void add(std::uint8_t* first, std::uint8_t* second, std::uint32_t ways, std::uint8_t delta) {
    Lanes<H>::add(first, ways & kFirst, delta);
    Lanes<H>::add(second, ways >> H, delta);
  }

 private:
  static constexpr std::uint32_t kFirst = (1u << H) - 1;
};

// Writes the slot of a position whose id was `found` (a mask of one way, or 0) in the set that begins at slot `base`,
// and appends the position to the pending ones if it wasn't. Returns the new end of the pending ones.
inline std::int32_t* settle_position(std::int32_t position, std::uint32_t base, std::uint32_t found,
                                     std::int32_t* slot, std::int32_t* pending) {
  const std::uint32_t missing = all_if_zero(found);
  const std::uint32_t way = static_cast<std::uint32_t>(__builtin_ctz(found | 0x80000000u));
  *slot = static_cast<std::int32_t>((base + way) | missing);
  *pending = position;
  return pending + (missing & 1);
}

// settle_position for 16 positions from `first` on.
inline std::int32_t* settle_positions(std::int32_t first, const std::uint32_t* bases, const std::uint32_t* found,
                                      std::int32_t* slots, std::int32_t* pending) {
  for (int j = 0; j < 16; ++j) pending = settle_position(first + j, bases[j], found[j], slots + j, pending);
  return pending;
}

}  // namespace
}  // namespace kvoffload
