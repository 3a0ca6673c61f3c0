// Policies and placements by name. Of the host only.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "placement.h"
#include "policies.h"

namespace kvoffload {

inline constexpr std::string_view kPolicyNames[] = {
#define KVOFFLOAD_POLICY(name, Struct) #name,
    KVOFFLOAD_POLICIES(KVOFFLOAD_POLICY)
#undef KVOFFLOAD_POLICY
};

inline std::optional<Policy> policy_named(std::string_view name) {
  for (std::int32_t number = 0; number < kPolicyCount; ++number) {
    if (name == kPolicyNames[number]) return static_cast<Policy>(number);
  }
  return std::nullopt;
}

// All names, for messages.
inline std::string policy_names() {
  std::string text;
  for (const std::string_view name : kPolicyNames) text.append(text.empty() ? "" : ", ").append(name);
  return text;
}

inline std::optional<Placement> placement_named(std::string_view name) {
  if (name == "one_set") return Placement::kOneSet;
  if (name == "two_sets") return Placement::kTwoSets;
  return std::nullopt;
}

}  // namespace kvoffload
