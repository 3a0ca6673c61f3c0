#pragma once

namespace c10_npu {

class NPUStream {
 public:
  void* stream(bool wait_for_queue) const;
};

NPUStream getCurrentNPUStream();

}  // namespace c10_npu
