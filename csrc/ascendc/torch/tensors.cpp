#include "tensors.h"

#include <c10/util/Exception.h>

namespace kvoffload::ascendc {
namespace {

bool agrees(at::IntArrayRef sizes, at::IntArrayRef shape) {
  if (sizes.size() != shape.size()) return false;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (shape[i] >= 0 && sizes[i] != shape[i]) return false;
  }
  return true;
}

}  // namespace

void check_tensor(const char* name, const at::Tensor& tensor, at::ScalarType type, at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(tensor.device().type() == c10::DeviceType::PrivateUse1, name, ": must be on the NPU, is on ",
                    tensor.device());
  TORCH_CHECK_VALUE(tensor.scalar_type() == type, name, ": must be ", type, ", got ", tensor.scalar_type());
  TORCH_CHECK_VALUE(agrees(tensor.sizes(), shape), name, ": expected the shape ", shape, " (-1: any), got ",
                    tensor.sizes());
  TORCH_CHECK_VALUE(tensor.is_contiguous(), name, ": must be contiguous");
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(tensor.data_ptr()) % kLineBytes == 0, name,
                    ": must begin on a line of ", kLineBytes, " bytes");
}

Components components_of(const char* name, at::TensorList rows, at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(rows.size() == 1 || rows.size() == kComponents, name, ": expected 1 or ", kComponents,
                    " components, got ", rows.size());
  Components components;
  for (size_t i = 0; i < rows.size(); ++i) {
    std::vector<int64_t> expected(shape.begin(), shape.end());
    expected.push_back(-1);
    check_tensor(name, rows[i], at::kByte, expected);
    components.data[i] = address(rows[i]);
    components.row_bytes[i] = rows[i].size(-1);
  }
  return components;
}

Components host_components(at::IntArrayRef addresses, const Components& like) {
  Components components;
  components.row_bytes = like.row_bytes;
  for (size_t i = 0; i < kComponents; ++i) {
    const bool present = i < addresses.size();
    TORCH_CHECK_VALUE(present == (like.row_bytes[i] != 0), "host: expected an address for each component of a row");
    if (!present) continue;
    TORCH_CHECK_VALUE(addresses[i] != 0, "host: component ", i, " is not registered");
    components.data[i] = reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(addresses[i]));
  }
  return components;
}

void check_same_rows(const char* name, const Components& rows, const Components& like) {
  TORCH_CHECK_VALUE(rows.row_bytes == like.row_bytes, name, ": rows of ", rows.row_bytes[0], " and ",
                    rows.row_bytes[1], " bytes, expected ", like.row_bytes[0], " and ", like.row_bytes[1]);
}

}  // namespace kvoffload::ascendc
