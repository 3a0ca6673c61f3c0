// Vector primitives of the plan in plain C++, for any processor.
#include <cstdint>

#include "lanes.h"

namespace kvoffload {
namespace {

template <int W>
struct Lanes {
  static std::uint32_t match(const std::int32_t* tags, std::int32_t id) {
    std::uint32_t mask = 0;
    for (int way = 0; way < W; ++way) mask |= static_cast<std::uint32_t>(tags[way] == id) << way;
    return mask;
  }

  static std::uint32_t zero(const std::uint8_t* bytes) {
    std::uint32_t mask = 0;
    for (int way = 0; way < W; ++way) mask |= static_cast<std::uint32_t>(bytes[way] == 0) << way;
    return mask;
  }

  template <int kBit>
  static std::uint32_t with_bit(const std::uint8_t* ages) {
    std::uint32_t mask = 0;
    for (int way = 0; way < W; ++way) mask |= static_cast<std::uint32_t>((ages[way] >> kBit) & 1) << way;
    return mask;
  }

  static void fill(std::uint8_t* ages, std::uint32_t ways, std::uint8_t value) {
    for (; ways != 0; ways &= ways - 1) ages[__builtin_ctz(ways)] = value;
  }

  static void add(std::uint8_t* ages, std::uint32_t ways, std::uint8_t delta) {
    if (delta == 0) return;
    for (; ways != 0; ways &= ways - 1) {
      std::uint8_t& age = ages[__builtin_ctz(ways)];
      age = static_cast<std::uint8_t>(age + delta);
    }
  }

  template <class P>
  static std::int64_t settle_partition(std::uint8_t* ages, const std::uint8_t* needed, std::int64_t slots) {
    std::int64_t count = 0;
    for (std::int64_t slot = 0; slot < slots; ++slot) {
      count += needed[slot];
      if constexpr (kHitChangesAge<P>) ages[slot] = needed[slot] != 0 ? age_after_hit<P>(ages[slot]) : ages[slot];
    }
    return count;
  }

  static std::int32_t* settle_block(std::int32_t first, const std::uint32_t* bases, const std::uint32_t* found,
                                    std::int32_t* slots, std::int32_t* pending) {
    return settle_positions(first, bases, found, slots, pending);
  }
};

}  // namespace
}  // namespace kvoffload

#include "plan_kernel.h"

namespace kvoffload {

PlanRequestFn portable_planner(Policy policy, Placement placement, int ways) {
  return planner(policy, placement, ways);
}

}  // namespace kvoffload
