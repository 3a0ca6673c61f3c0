// GlobalTensor and LocalTensor.
#pragma once

#include "types.h"

namespace AscendC {

template <typename T>
class GlobalTensor {
 public:
  using PrimType = T;

  void SetGlobalBuffer(__gm__ T* buffer, uint64_t bufferSize) {
    data_ = buffer;
    size_ = bufferSize;
  }
  void SetGlobalBuffer(__gm__ T* buffer) { SetGlobalBuffer(buffer, 0); }

  const __gm__ T* GetPhyAddr() const { return data_; }
  __gm__ T* GetPhyAddr(uint64_t offset) const { return data_ + offset; }
  uint64_t GetSize() const { return size_; }

  T GetValue(uint64_t offset, const Loc& loc = Loc::current()) const {
    T value;
    detail::core().gm_read(detail::core().site("GlobalTensor::GetValue", loc), data_ + offset, sizeof(T), &value);
    return value;
  }
  void SetValue(uint64_t offset, T value, const Loc& loc = Loc::current()) {
    detail::core().gm_write(detail::core().site("GlobalTensor::SetValue", loc), data_ + offset, sizeof(T), &value);
  }
  GlobalTensor operator[](uint64_t offset) const {
    GlobalTensor part = *this;
    part.data_ += offset;
    part.size_ = size_ > offset ? size_ - offset : 0;
    return part;
  }

 private:
  __gm__ T* data_ = nullptr;
  uint64_t size_ = 0;
};

template <typename T>
class LocalTensor {
 public:
  using PrimType = T;

  LocalTensor() = default;
  LocalTensor(const ::acpu::UbExtent& extent, TPosition position)
      : extent_(extent), address_(extent.begin), size_((extent.end - extent.begin) / sizeof(T)), position_(position) {}

  T GetValue(uint32_t offset, const Loc& loc = Loc::current()) const {
    T value;
    detail::core().ub_read(detail::core().site("LocalTensor::GetValue", loc), extent_, byte(offset), sizeof(T), &value);
    return value;
  }
  template <typename U>
  void SetValue(uint32_t offset, U value, const Loc& loc = Loc::current()) const {
    const T element = static_cast<T>(value);
    const ::acpu::SiteId site = detail::core().site("LocalTensor::SetValue", loc);
    detail::core().ub_write(site, extent_, byte(offset), sizeof(T), &element);
  }
  LocalTensor operator[](uint32_t offset) const {
    LocalTensor part = *this;
    part.address_ = byte(offset);
    part.size_ = size_ > offset ? size_ - offset : 0;
    return part;
  }
  template <typename U>
  LocalTensor<U> ReinterpretCast() const {
    LocalTensor<U> other;
    other.extent_ = extent_;
    other.address_ = address_;
    other.size_ = static_cast<uint32_t>(uint64_t{size_} * sizeof(T) / sizeof(U));
    other.position_ = position_;
    return other;
  }
  uint32_t GetSize() const { return size_; }
  uint32_t GetLength() const { return static_cast<uint32_t>(size_ * sizeof(T)); }
  void SetSize(uint32_t size) { size_ = size; }
  TPosition GetPosition() const { return position_; }

  // The twin's own: the tensor's place in the unified buffer.
  uint32_t acpu_address() const { return address_; }
  const ::acpu::UbExtent& acpu_extent() const { return extent_; }

 private:
  template <typename U>
  friend class LocalTensor;

  uint32_t byte(uint32_t offset) const { return static_cast<uint32_t>(address_ + uint64_t{offset} * sizeof(T)); }

  ::acpu::UbExtent extent_{};
  uint32_t address_ = 0;
  uint32_t size_ = 0;
  TPosition position_ = TPosition::VECCALC;
};

namespace detail {

inline uint8_t* ub() { return core().ub(); }

template <typename T>
T load(uint32_t address) {
  T value;
  std::memcpy(&value, ub() + address, sizeof(T));
  return value;
}

template <typename T>
void store(uint32_t address, const T& value) {
  std::memcpy(ub() + address, &value, sizeof(T));
}

template <typename T>
::acpu::Access ub_access(const char* operand, bool write, const LocalTensor<T>& tensor, uint64_t bytes,
                         uint32_t rows = 1, uint64_t stride = 0) {
  return {operand, write, tensor.acpu_address(), bytes, rows, stride, false, tensor.acpu_extent()};
}

template <typename T>
::acpu::Access gm_access(const char* operand, bool write, const GlobalTensor<T>& tensor, uint64_t bytes,
                         uint32_t rows = 1, uint64_t stride = 0) {
  return {operand, write, reinterpret_cast<uint64_t>(tensor.GetPhyAddr()), bytes, rows, stride, true, {}};
}

// Reports an address of the unified buffer that is not a multiple of `unit`.
template <typename T>
void need_aligned(::acpu::SiteId site, const char* operand, const LocalTensor<T>& tensor, uint32_t unit = 32) {
  if (tensor.acpu_address() % unit == 0) return;
  core().report(::acpu::Kind::kAlignment, site,
                std::string(operand) + " starts at byte " + std::to_string(tensor.acpu_address()) +
                    " of the unified buffer, not a multiple of " + std::to_string(unit));
}

inline void need(bool condition, ::acpu::Kind kind, ::acpu::SiteId site, const char* rule) {
  if (!condition) core().report(kind, site, rule);
}

}  // namespace detail

}  // namespace AscendC
