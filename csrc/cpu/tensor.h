// Checked access to the tensors that Python passes: CPU, contiguous, the right type and shape, or ValueError naming
// the argument.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <string>
#include <type_traits>
#include <vector>

#include "checks.h"

namespace kvoffload {

// The parts of DLPack's C exchange interface (DLPack 1.2) that a borrowed view needs; layout fixed by that standard.
struct ExchangeApi {
  std::uint32_t major, minor;
  ExchangeApi* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_object;
  void* managed_tensor_to_object;
  int (*tensor_from_object)(void* object, nanobind::dlpack::dltensor* out);
  void* current_work_stream;
};

// A tensor argument. Borrowed through the exchange interface where the tensor's type has one: that takes 0.1 us,
// the Python protocol 2 us, and a step passes a thousand tensors.
class Tensor {
 public:
  Tensor() = default;
  Tensor(Tensor&&) = default;  // no copies: the view may point into the object
  Tensor& operator=(Tensor&&) = default;

  // False when the object is no tensor.
  bool load(nanobind::handle object) noexcept {
    object_ = nanobind::borrow(object);
    return borrow_view(object) || import_view(object);
  }

  const nanobind::object& object() const { return object_; }
  std::size_t ndim() const { return static_cast<std::size_t>(view_.ndim); }
  std::int64_t shape(std::size_t axis) const { return view_.shape[axis]; }
  std::int64_t extent(std::size_t axis) const { return axis < ndim() ? shape(axis) : 0; }
  bool on_cpu() const { return view_.device.device_type == nanobind::device::cpu::value; }
  nanobind::dlpack::dtype dtype() const { return view_.dtype; }
  void* data() const { return static_cast<char*>(view_.data) + view_.byte_offset; }

  bool contiguous() const {
    std::int64_t expected = 1;
    bool dense = true;
    for (std::size_t i = ndim(); i-- > 0;) {
      if (shape(i) == 0) return true;  // regardless of the strides
      dense &= shape(i) == 1 || view_.strides == nullptr || view_.strides[i] == expected;
      expected *= shape(i);
    }
    return dense;
  }

 private:
  bool borrow_view(nanobind::handle object) noexcept {
    auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
    PyObject* capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    if (capsule == nullptr) return forget_error();
    const auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    Py_DECREF(capsule);
    if (api == nullptr) return forget_error();
    if (api->major != 1 || api->tensor_from_object == nullptr) return false;
    return api->tensor_from_object(object.ptr(), &view_) == 0 || forget_error();
  }

  bool import_view(nanobind::handle object) noexcept {
    if (!nanobind::try_cast(object, array_)) return false;
    for (std::size_t i = 0; i < array_.ndim(); ++i) {
      shape_.push_back(static_cast<std::int64_t>(array_.shape(i)));
      strides_.push_back(array_.stride(i));
    }
    view_ = {array_.data(),  {array_.device_type(), array_.device_id()}, static_cast<std::int32_t>(array_.ndim()),
             array_.dtype(), shape_.data(), strides_.data(), 0};
    return true;
  }

  static bool forget_error() noexcept {
    PyErr_Clear();
    return false;
  }

  nanobind::object object_;
  nanobind::ndarray<> array_;  // set when the view could not be borrowed
  std::vector<std::int64_t> shape_, strides_;
  nanobind::dlpack::dltensor view_{};
};

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

// The data of `tensor`, whose shape must be `shape` where that isn't kAny.
template <class T, std::size_t N>
T* data_of(const Tensor& tensor, const char* name, const std::array<std::int64_t, N>& shape) {
  require(tensor.on_cpu(), name, ": expected a CPU tensor");
  require(tensor.dtype() == nanobind::dtype<T>(), name, ": expected dtype ", dtype_name<T>());
  bool fits = tensor.ndim() == N;
  for (std::size_t i = 0; fits && i < N; ++i) {
    fits = shape[i] == kAny || shape[i] == tensor.shape(i);
  }
  if (!fits) refuse(name, ": expected shape ", shape_text(shape), ", got ", shape_text(tensor));
  require(tensor.contiguous(), name, ": expected a contiguous tensor");
  return static_cast<T*>(tensor.data());
}

}  // namespace kvoffload

namespace nanobind::detail {

template <>
struct type_caster<kvoffload::Tensor> {
  NB_TYPE_CASTER(kvoffload::Tensor, const_name("torch.Tensor"))

  bool from_python(handle source, std::uint8_t, cleanup_list*) noexcept { return value.load(source); }
};

}  // namespace nanobind::detail
