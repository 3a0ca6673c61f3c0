// In which sets of a partition an id may be resident: on the CPU, and written so that AscendC can compile it as well.
// The meaning is that of vllm_kvoffload/policies/placement.py.
#pragma once

#include "policy.h"

namespace kvoffload {

enum class Placement : std::int32_t { kOneSet, kTwoSets };

// An id's two sets are in one aligned block of this many neighbouring sets, so that blocks are planned independently.
constexpr std::uint32_t kBlockSets = 64;

constexpr std::uint32_t kScrambler = 2654435769u;  // 2^32 divided by the golden ratio

namespace {

// The other set of an id in set `set`. `round` is id / sets; `block` is the smaller of kBlockSets and the sets, a power
// of two from 2 on. One of the two sets has an even number, the other an odd one: they always differ, without a
// division or a comparison.
KVOFFLOAD_POLICY_CODE std::uint32_t other_set(std::uint32_t set, std::uint32_t round, std::uint32_t block) {
  return set ^ (((round * kScrambler >> 16) & (block - 1)) | 1u);
}

}  // namespace
}  // namespace kvoffload
