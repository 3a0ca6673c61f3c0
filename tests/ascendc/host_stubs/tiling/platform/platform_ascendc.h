#pragma once

#include <cstdint>

namespace platform_ascendc {

class PlatformAscendC {
 public:
  uint32_t GetCoreNumAiv() const;
};

class PlatformAscendCManager {
 public:
  static PlatformAscendC* GetInstance();
};

}  // namespace platform_ascendc
