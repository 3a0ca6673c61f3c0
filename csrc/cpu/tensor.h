// Checked access to the tensors that Python passes: CPU, contiguous, the right type and shape, or ValueError naming
// the argument.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <string>

#include "checks.h"

namespace kvoffload {

using Tensor = nanobind::ndarray<>;

inline constexpr std::int64_t kAny = -1;

template <class T>
constexpr const char* dtype_name() {
  if constexpr (std::is_same_v<T, std::uint8_t>) return "uint8";
  if constexpr (std::is_same_v<T, std::int32_t>) return "int32";
  if constexpr (std::is_same_v<T, std::int64_t>) return "int64";
}

inline std::string shape_text(const Tensor& tensor) {
  std::string text = "[";
  for (std::size_t i = 0; i < tensor.ndim(); ++i) text += (i ? ", " : "") + std::to_string(tensor.shape(i));
  return text + "]";
}

template <std::size_t N>
std::string shape_text(const std::array<std::int64_t, N>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < N; ++i) {
    text += (i ? ", " : "") + (shape[i] == kAny ? std::string("any") : std::to_string(shape[i]));
  }
  return text + "]";
}

inline bool contiguous(const Tensor& tensor) {
  if (tensor.size() == 0) return true;  // whatever its strides say
  std::int64_t expected = 1;
  for (std::size_t i = tensor.ndim(); i-- > 0;) {
    if (tensor.shape(i) != 1 && tensor.stride(i) != expected) return false;
    expected *= static_cast<std::int64_t>(tensor.shape(i));
  }
  return true;
}

// The data of `tensor`, whose shape must be `shape` where that isn't kAny.
template <class T, std::size_t N>
T* data_of(const Tensor& tensor, const char* name, const std::array<std::int64_t, N>& shape) {
  require(tensor.device_type() == nanobind::device::cpu::value, name, ": expected a CPU tensor");
  require(tensor.dtype() == nanobind::dtype<T>(), name, ": expected dtype ", dtype_name<T>());
  bool fits = tensor.ndim() == N;
  for (std::size_t i = 0; fits && i < N; ++i) {
    fits = shape[i] == kAny || shape[i] == static_cast<std::int64_t>(tensor.shape(i));
  }
  if (!fits) refuse(name, ": expected shape ", shape_text(shape), ", got ", shape_text(tensor));
  require(contiguous(tensor), name, ": expected a contiguous tensor");
  return static_cast<T*>(tensor.data());
}

inline std::int64_t extent(const Tensor& tensor, std::size_t axis) {
  return axis < tensor.ndim() ? static_cast<std::int64_t>(tensor.shape(axis)) : 0;
}

}  // namespace kvoffload
