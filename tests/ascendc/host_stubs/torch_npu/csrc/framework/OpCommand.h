#pragma once

#include <functional>
#include <string>

namespace at_npu::native {

class OpCommand {
 public:
  static void RunOpApi(const std::string& name, const std::function<int()>& call);
};

}  // namespace at_npu::native
