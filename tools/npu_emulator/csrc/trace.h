// What a stand-in does: with NPU_EMULATOR_TRACE=1 it says that it was called.
#pragma once

#include <cstdio>
#include <cstdlib>

inline long npu_emulator_unsupported(const char *name, long code) {
  if (std::getenv("NPU_EMULATOR_TRACE") != nullptr) std::fprintf(stderr, "npu_emulator: %s isn't emulated\n", name);
  return code;
}
