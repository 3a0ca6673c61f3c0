// Declarations that csrc/ascendc/torch uses, as documented; enough to compile it without CANN.
#pragma once

#include <cstdint>

using aclError = int;
constexpr aclError ACL_SUCCESS = 0;
enum aclrtHostRegisterType { ACL_HOST_REGISTER_MAPPED = 0 };

extern "C" {
aclError aclrtHostRegister(void* data, uint64_t bytes, aclrtHostRegisterType type, void** mapped);
aclError aclrtHostUnregister(void* data);
}
