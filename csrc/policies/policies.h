// The policies that there are. A new one needs a header beside this one and two lines here; in Python, see
// vllm_kvoffload/policies.
#pragma once

#include "clock.h"
#include "fifo.h"
#include "rrip.h"
#include "rrip3.h"

// POLICY(name of the option, struct), in the order of their numbers, which is that of the table in Python.
#define KVOFFLOAD_POLICIES(POLICY) \
  POLICY(fifo, Fifo)               \
  POLICY(clock, Clock)             \
  POLICY(rrip, Rrip)               \
  POLICY(rrip3, Rrip3)

namespace kvoffload {

enum class Policy : std::int32_t {
#define KVOFFLOAD_POLICY(name, Struct) k##Struct,
  KVOFFLOAD_POLICIES(KVOFFLOAD_POLICY)
#undef KVOFFLOAD_POLICY
};

constexpr std::int32_t kPolicyCount = 0
#define KVOFFLOAD_POLICY(name, Struct) +1
    KVOFFLOAD_POLICIES(KVOFFLOAD_POLICY)
#undef KVOFFLOAD_POLICY
    ;

#define KVOFFLOAD_POLICY(name, Struct) \
  static_assert(Struct::kAgeBits <= kMaxAgeBits && Struct::kNewAge >> Struct::kAgeBits == 0, #name);
KVOFFLOAD_POLICIES(KVOFFLOAD_POLICY)
#undef KVOFFLOAD_POLICY

}  // namespace kvoffload
