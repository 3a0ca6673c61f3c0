// Policies by name. Of the host only.
#pragma once

#include <optional>
#include <string>
#include <string_view>

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

}  // namespace kvoffload
