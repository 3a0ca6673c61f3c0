// DataCopy and DataCopyPad.
#pragma once

#include "tensor.h"

namespace AscendC {

namespace detail {

inline constexpr uint32_t kMaxBlockCount = 4095;
inline constexpr uint32_t kMaxPadBlockBytes = 2097151;  // 2^21 - 1

// `rows` ranges of `bytes`, as the copy engine moves them.
struct Rows {
  uint32_t rows;
  uint64_t bytes;
  uint64_t from_stride;
  uint64_t to_stride;
};

inline ::acpu::Access with_rows(::acpu::Access access, uint32_t rows, uint64_t bytes, uint64_t stride) {
  access.rows = rows;
  access.bytes = bytes;
  access.stride = stride;
  return access;
}

// Addresses of the unified buffer are resolved when the copy takes effect.
inline uint8_t* memory_of(const ::acpu::Access& access) {
  return access.global ? reinterpret_cast<uint8_t*>(access.address) : ub() + access.address;
}

inline void copy_rows(::acpu::Pipe pipe, ::acpu::SiteId site, const ::acpu::Access& dst, const ::acpu::Access& src,
                      const Rows& shape) {
  const auto to = with_rows(dst, shape.rows, shape.bytes, shape.to_stride);
  const auto from = with_rows(src, shape.rows, shape.bytes, shape.from_stride);
  core().issue(pipe, site, {to, from}, [to, from, shape] {
    for (uint32_t row = 0; row < shape.rows; ++row) {
      std::memmove(memory_of(to) + row * shape.to_stride, memory_of(from) + row * shape.from_stride, shape.bytes);
    }
  });
}

inline Rows block_rows(::acpu::SiteId site, const DataCopyParams& params) {
  using ::acpu::Kind;
  need(params.blockCount <= kMaxBlockCount, Kind::kLimit, site, "blockCount is outside 0..4095");
  const uint64_t bytes = uint64_t{params.blockLen} * 32;
  return {params.blockCount, bytes, bytes + uint64_t{params.srcStride} * 32, bytes + uint64_t{params.dstStride} * 32};
}

// Sizes that are not a multiple of 32 bytes are rounded down.
template <typename T>
Rows count_rows(::acpu::SiteId site, uint64_t count) {
  const uint64_t bytes = count * sizeof(T);
  need(bytes % 32 == 0, ::acpu::Kind::kAlignment, site, "moves a number of bytes that is not a multiple of 32");
  return {1, bytes / 32 * 32, 0, 0};
}

template <typename T>
void need_element_aligned(::acpu::SiteId site, const GlobalTensor<T>& tensor) {
  need(reinterpret_cast<uintptr_t>(tensor.GetPhyAddr()) % sizeof(T) == 0, ::acpu::Kind::kAlignment, site,
       "an address of global memory that is not a multiple of the element");
}

template <typename T>
void fill(uint8_t* to, uint32_t count, const T& value) {
  for (uint32_t i = 0; i < count; ++i) std::memcpy(to + i * sizeof(T), &value, sizeof(T));
}

inline void check_pad_params(::acpu::SiteId site, const DataCopyExtParams& params, uint32_t element) {
  using ::acpu::Kind;
  const bool count_fits = params.blockCount >= 1 && params.blockCount <= kMaxBlockCount;
  const bool length_fits = params.blockLen >= 1 && params.blockLen <= kMaxPadBlockBytes;
  need(count_fits, Kind::kLimit, site, "blockCount is outside 1..4095");
  need(length_fits, Kind::kLimit, site, "blockLen is outside 1..2097151");
  need(params.blockLen % element == 0, Kind::kAlignment, site, "blockLen is not a multiple of the element");
}

}  // namespace detail

// `count` elements; a multiple of 32 bytes.
template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, uint32_t count, const Loc& loc = Loc::current()) {
  const ::acpu::SiteId site = detail::core().site("DataCopy", loc);
  detail::need_aligned(site, "dst", dst);
  detail::need_element_aligned(site, src);
  detail::copy_rows(::acpu::Pipe::kMte2, site, detail::ub_access("dst", true, dst, 0),
                    detail::gm_access("src", false, src, 0), detail::count_rows<T>(site, count));
}

template <typename T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, uint32_t count, const Loc& loc = Loc::current()) {
  const ::acpu::SiteId site = detail::core().site("DataCopy", loc);
  detail::need_aligned(site, "src", src);
  detail::need_element_aligned(site, dst);
  detail::copy_rows(::acpu::Pipe::kMte3, site, detail::gm_access("dst", true, dst, 0),
                    detail::ub_access("src", false, src, 0), detail::count_rows<T>(site, count));
}

template <typename T>
void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, uint32_t count, const Loc& loc = Loc::current()) {
  const ::acpu::SiteId site = detail::core().site("DataCopy", loc);
  detail::need_aligned(site, "dst", dst);
  detail::need_aligned(site, "src", src);
  detail::copy_rows(::acpu::Pipe::kV, site, detail::ub_access("dst", true, dst, 0),
                    detail::ub_access("src", false, src, 0), detail::count_rows<T>(site, count));
}

template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& params,
              const Loc& loc = Loc::current()) {
  const ::acpu::SiteId site = detail::core().site("DataCopy", loc);
  detail::need_aligned(site, "dst", dst);
  detail::need_element_aligned(site, src);
  detail::copy_rows(::acpu::Pipe::kMte2, site, detail::ub_access("dst", true, dst, 0),
                    detail::gm_access("src", false, src, 0), detail::block_rows(site, params));
}

template <typename T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& params,
              const Loc& loc = Loc::current()) {
  const ::acpu::SiteId site = detail::core().site("DataCopy", loc);
  detail::need_aligned(site, "src", src);
  detail::need_element_aligned(site, dst);
  detail::copy_rows(::acpu::Pipe::kMte3, site, detail::gm_access("dst", true, dst, 0),
                    detail::ub_access("src", false, src, 0), detail::block_rows(site, params));
}

template <typename T>
void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& params,
              const Loc& loc = Loc::current()) {
  const ::acpu::SiteId site = detail::core().site("DataCopy", loc);
  detail::need_aligned(site, "dst", dst);
  detail::need_aligned(site, "src", src);
  detail::copy_rows(::acpu::Pipe::kV, site, detail::ub_access("dst", true, dst, 0),
                    detail::ub_access("src", false, src, 0), detail::block_rows(site, params));
}

// Blocks of any number of bytes. In the unified buffer each block starts on 32 bytes; what fills it up to the next 32
// bytes is paddingValue where asked for, and unspecified otherwise.
template <typename T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& params,
                 const DataCopyPadExtParams<T>& pad, const Loc& loc = Loc::current()) {
  using ::acpu::Kind;
  const ::acpu::SiteId site = detail::core().site("DataCopyPad", loc);
  detail::need_aligned(site, "dst", dst);
  detail::check_pad_params(site, params, sizeof(T));
  const uint32_t left = pad.leftPadding * sizeof(T), right = pad.rightPadding * sizeof(T);
  detail::need(left <= 32 && right <= 32, Kind::kLimit, site, "a padding of more than 32 bytes");
  detail::need(!pad.isPad || sizeof(T) < 8 || pad.paddingValue == T(), Kind::kLimit, site,
               "a padding of 64-bit elements other than 0");
  const uint64_t row_bytes = AlignUp<uint64_t>(uint64_t{left} + params.blockLen + right, 32);
  const uint64_t to_stride = row_bytes + uint64_t{params.dstStride} * 32;
  const uint64_t from_stride = uint64_t{params.blockLen} + params.srcStride;
  const auto to = detail::ub_access("dst", true, dst, row_bytes, params.blockCount, to_stride);
  const auto from = detail::gm_access("src", false, src, params.blockLen, params.blockCount, from_stride);
  const uint32_t first = left, last = left + params.blockLen;  // the block within its row
  detail::core().issue(::acpu::Pipe::kMte2, site, {to, from}, [=] {
    for (uint32_t row = 0; row < to.rows; ++row) {
      uint8_t* block = detail::memory_of(to) + row * to_stride;
      std::memset(block, ::acpu::kPoison, row_bytes);
      if (pad.isPad) {
        detail::fill(block, left / sizeof(T), pad.paddingValue);
        detail::fill(block + last, right / sizeof(T), pad.paddingValue);
      }
      std::memcpy(block + first, detail::memory_of(from) + row * from_stride, params.blockLen);
    }
  });
  // The contents of bytes that were not requested are undefined.
  auto unspecified = to;
  unspecified.address += pad.isPad ? last + right : last;
  unspecified.bytes = row_bytes - (pad.isPad ? last + right : last);
  detail::core().forget(unspecified);
  if (!pad.isPad) {
    unspecified.address = to.address;
    unspecified.bytes = left;
    detail::core().forget(unspecified);
  }
}

template <typename T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& params,
                 const DataCopyPadParams& pad, const Loc& loc = Loc::current()) {
  T value;
  std::memcpy(&value, &pad.paddingValue, sizeof value);
  DataCopyPad(dst, src, DataCopyExtParams(params.blockCount, params.blockLen, params.srcStride, params.dstStride, 0),
              DataCopyPadExtParams<T>(pad.isPad, pad.leftPadding, pad.rightPadding, value), loc);
}

template <typename T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& params,
                 const Loc& loc = Loc::current()) {
  const ::acpu::SiteId site = detail::core().site("DataCopyPad", loc);
  detail::need_aligned(site, "src", src);
  detail::check_pad_params(site, params, sizeof(T));
  const detail::Rows shape{params.blockCount, params.blockLen,
                           AlignUp<uint64_t>(params.blockLen, 32) + uint64_t{params.srcStride} * 32,
                           uint64_t{params.blockLen} + params.dstStride};
  detail::copy_rows(::acpu::Pipe::kMte3, site, detail::gm_access("dst", true, dst, 0),
                    detail::ub_access("src", false, src, 0), shape);
}

template <typename T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& params,
                 const Loc& loc = Loc::current()) {
  DataCopyPad(dst, src, DataCopyExtParams(params.blockCount, params.blockLen, params.srcStride, params.dstStride, 0),
              loc);
}

}  // namespace AscendC
