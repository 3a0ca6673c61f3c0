// Checks of the tensors that go to a kernel, and their addresses.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <cstdint>
#include <string>

#include "../common/tiling_data.h"

namespace kvoffload::ascendc {

// A contiguous tensor on the NPU of that type and shape; -1: any size.
void check_tensor(const char* name, const at::Tensor& tensor, at::ScalarType type, at::IntArrayRef shape);

inline uint8_t* address(const at::Tensor& tensor) { return static_cast<uint8_t*>(tensor.data_ptr()); }

// Rows by component: the address of each, and the bytes of its rows (the last dimension); 0 for no such component.
struct Components {
  std::array<uint8_t*, kComponents> data{};
  std::array<int64_t, kComponents> row_bytes{};
};

// `rows`: one or two uint8 tensors whose shapes agree but for the last dimension.
Components components_of(const char* name, at::TensorList rows, at::IntArrayRef shape);

// Rows that a kernel reaches at their device-visible address, as host_register returned it.
Components host_components(at::IntArrayRef addresses, const Components& like);

void check_same_rows(const char* name, const Components& rows, const Components& like);

}  // namespace kvoffload::ascendc
