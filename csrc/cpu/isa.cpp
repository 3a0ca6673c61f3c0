#include "isa.h"

#include <atomic>
#include <stdexcept>

namespace kvoffload {
namespace {

bool supported(Isa isa) {
#if defined(KVOFFLOAD_X86)
  if (isa == Isa::kAvx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi");
  if (isa == Isa::kAvx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("bmi");
  }
#elif defined(KVOFFLOAD_NEON)
  if (isa == Isa::kNeon) return true;
#endif
  return isa == Isa::kPortable;
}

std::atomic<Isa>& current() {
  static std::atomic<Isa> isa{available_isas().back()};
  return isa;
}

}  // namespace

std::string_view isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAvx2: return "avx2";
    case Isa::kAvx512: return "avx512";
    case Isa::kNeon: return "neon";
    case Isa::kPortable: break;
  }
  return "portable";
}

std::vector<Isa> available_isas() {
  std::vector<Isa> isas;
  for (Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512, Isa::kNeon}) {
    if (supported(isa)) isas.push_back(isa);
  }
  return isas;
}

Isa current_isa() { return current().load(std::memory_order_relaxed); }

void set_isa(const std::string& name) {
  const std::vector<Isa> isas = available_isas();
  std::string choices = "auto";
  for (Isa isa : isas) {
    if (name == isa_name(isa) || (name == "auto" && isa == isas.back())) {
      current().store(isa, std::memory_order_relaxed);
      return;
    }
    choices += ", " + std::string(isa_name(isa));
  }
  throw std::invalid_argument("isa: '" + name + "' is not available here; choose one of " + choices);
}

}  // namespace kvoffload
