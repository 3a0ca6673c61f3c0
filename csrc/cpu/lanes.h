// Shared code of the vector primitives of all instruction sets. Internal linkage, as in plan_kernel.h.
#pragma once

#include <cstdint>

#include "../policies/policy.h"

namespace kvoffload {
namespace {

constexpr std::int32_t kNoSlot = -1;

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
