// Argument checks: one exception type, which the bindings turn into ValueError, and messages that name the argument.
#pragma once

#include <sstream>
#include <stdexcept>

namespace kvoffload {

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

// The parts must be cheap to evaluate: they are, also when the condition holds.
template <class... Parts>
void require(bool condition, const Parts&... parts) {
  if (!condition) [[unlikely]] refuse(parts...);
}

}  // namespace kvoffload
