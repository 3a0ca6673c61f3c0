// Definitions behind the declarations here, and launches that do nothing: the binding can be linked and loaded.
#include "../../../csrc/ascendc/dsa_install/op_host/dsa_install_launch.h"
#include "../../../csrc/ascendc/dsa_plan/op_host/dsa_plan_launch.h"
#include "../../../csrc/ascendc/dsa_serve/op_host/dsa_serve_launch.h"
#include "../../../csrc/ascendc/dsa_serve_compact/op_host/dsa_serve_compact_launch.h"
#include "../../../csrc/ascendc/gather_selection/op_host/gather_selection_launch.h"
#include "../../../csrc/ascendc/host_write/op_host/host_write_launch.h"
#include "acl/acl.h"
#include "tiling/platform/platform_ascendc.h"
#include "torch_npu/csrc/core/npu/NPUStream.h"
#include "torch_npu/csrc/framework/OpCommand.h"

namespace kvoffload::ascendc {

void launch_dsa_plan(void*, const PlanTiling&, const PlanPointers&) {}
void launch_dsa_serve(void*, const ServeTiling&, const ServePointers&) {}
void launch_dsa_serve_compact(void*, const ServeCompactTiling&, const ServeCompactPointers&) {}
void launch_dsa_install(void*, const InstallTiling&, const InstallPointers&) {}
void launch_gather_selection(void*, const GatherTiling&, const GatherPointers&) {}
void launch_host_write(void*, const HostWriteTiling&, const HostWritePointers&) {}

}  // namespace kvoffload::ascendc

aclError aclrtHostRegister(void* data, uint64_t bytes, aclrtHostRegisterType, void** mapped) {
  if (bytes % 4096 != 0) return 107000;
  *mapped = data;
  return ACL_SUCCESS;
}

aclError aclrtHostUnregister(void*) { return ACL_SUCCESS; }

namespace platform_ascendc {
uint32_t PlatformAscendC::GetCoreNumAiv() const { return 40; }
PlatformAscendC* PlatformAscendCManager::GetInstance() {
  static PlatformAscendC platform;
  return &platform;
}
}  // namespace platform_ascendc

namespace c10_npu {
void* NPUStream::stream(bool) const { return nullptr; }
NPUStream getCurrentNPUStream() { return {}; }
}  // namespace c10_npu

namespace at_npu::native {
void OpCommand::RunOpApi(const std::string&, const std::function<int()>& call) { call(); }
}  // namespace at_npu::native
