// Comparisons to bit masks, and Select by a bit mask.
#pragma once

#include "vector.h"

namespace AscendC {

namespace detail {

template <typename T>
bool holds(CMPMODE mode, T a, T b) {
  switch (mode) {
    case CMPMODE::LT: return a < b;
    case CMPMODE::GT: return a > b;
    case CMPMODE::EQ: return a == b;
    case CMPMODE::LE: return a <= b;
    case CMPMODE::GE: return a >= b;
    case CMPMODE::NE: return !(a == b);
  }
  return false;
}

template <typename T>
void check_compare(::acpu::SiteId site, CMPMODE mode, uint64_t count) {
  using ::acpu::Kind;
  need(count * sizeof(T) % 256 == 0, Kind::kAlignment, site, "the elements compared are not a multiple of 256 bytes");
  need(!std::is_same_v<T, int32_t> || mode == CMPMODE::EQ, Kind::kLimit, site, "int32 is compared by EQ only");
}

// Sets bit i of the mask at `d` to test(i).
template <typename F>
void store_bits(uint32_t d, uint64_t count, F test) {
  for (uint64_t byte = 0; byte < count / 8; ++byte) {
    uint8_t bits = 0;
    for (int bit = 0; bit < 8; ++bit) bits |= static_cast<uint8_t>(test(byte * 8 + bit) << bit);
    store<uint8_t>(d + byte, bits);
  }
}

inline bool load_bit(uint32_t mask, uint64_t i) { return load<uint8_t>(mask + i / 8) >> (i % 8) & 1; }

template <typename T>
concept Comparable = one_of<T, half, float, int32_t>;
template <typename T>
concept BitMask = one_of<T, uint8_t, int8_t>;

}  // namespace detail

template <detail::Comparable T, detail::BitMask U>
void Compare(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, CMPMODE cmpMode,
             uint32_t count, const Loc& loc = Loc::current()) {
  const ::acpu::SiteId site = detail::core().site("Compare", loc);
  const uint64_t n = detail::checked_count(site, count), bytes = n * sizeof(T);
  detail::check_compare<T>(site, cmpMode, n);
  detail::need_aligned(site, "dst", dst);
  detail::need_aligned(site, "src0", src0);
  detail::need_aligned(site, "src1", src1);
  detail::need_apart(site, dst, n / 8, src0, bytes, false);
  detail::need_apart(site, dst, n / 8, src1, bytes, false);
  const uint32_t d = dst.acpu_address(), a = src0.acpu_address(), b = src1.acpu_address();
  detail::core().issue(::acpu::Pipe::kV, site,
                       {detail::ub_access("dst", true, dst, n / 8), detail::ub_access("src0", false, src0, bytes),
                        detail::ub_access("src1", false, src1, bytes)},
                       [=] {
                         detail::store_bits(d, n, [&](uint64_t i) {
                           return detail::holds(cmpMode, detail::load<T>(a + i * sizeof(T)),
                                                detail::load<T>(b + i * sizeof(T)));
                         });
                       });
}

template <detail::Comparable T, detail::BitMask U>
void CompareScalar(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const T src1Scalar,
                   CMPMODE cmpMode, uint32_t count, const Loc& loc = Loc::current()) {
  const ::acpu::SiteId site = detail::core().site("CompareScalar", loc);
  const uint64_t n = detail::checked_count(site, count), bytes = n * sizeof(T);
  detail::check_compare<T>(site, cmpMode, n);
  detail::need_aligned(site, "dst", dst);
  detail::need_aligned(site, "src0", src0);
  detail::need_apart(site, dst, n / 8, src0, bytes, false);
  const uint32_t d = dst.acpu_address(), a = src0.acpu_address();
  const T scalar = src1Scalar;
  detail::core().issue(
      ::acpu::Pipe::kV, site,
      {detail::ub_access("dst", true, dst, n / 8), detail::ub_access("src0", false, src0, bytes)}, [=] {
        detail::store_bits(
            d, n, [&](uint64_t i) { return detail::holds(cmpMode, detail::load<T>(a + i * sizeof(T)), scalar); });
      });
}

// dst[i] = bit i of selMask ? src0[i] : src1[i]. Copies bits regardless of the type.
template <detail::Floating T, typename U>
  requires detail::one_of<U, uint8_t, uint16_t, uint32_t, uint64_t>
void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0,
            const LocalTensor<T>& src1, SELMODE selMode, uint32_t count, const Loc& loc = Loc::current()) {
  const ::acpu::SiteId site = detail::core().site("Select", loc);
  const uint64_t n = detail::checked_count(site, count), bytes = n * sizeof(T), mask_bytes = (n + 7) / 8;
  detail::need(selMode == SELMODE::VSEL_TENSOR_TENSOR_MODE, ::acpu::Kind::kLimit, site,
               "only VSEL_TENSOR_TENSOR_MODE is modelled for two tensors");
  detail::core().need_spare(8192, site);
  detail::need_aligned(site, "dst", dst);
  detail::need_aligned(site, "selMask", selMask);
  detail::need_aligned(site, "src0", src0);
  detail::need_aligned(site, "src1", src1);
  detail::need_apart(site, dst, bytes, selMask, mask_bytes, false);
  const uint32_t d = dst.acpu_address(), m = selMask.acpu_address(), a = src0.acpu_address(), b = src1.acpu_address();
  detail::core().issue(
      ::acpu::Pipe::kV, site,
      {detail::ub_access("dst", true, dst, bytes), detail::ub_access("selMask", false, selMask, mask_bytes),
       detail::ub_access("src0", false, src0, bytes), detail::ub_access("src1", false, src1, bytes)},
      [=] {
        for (uint64_t i = 0; i < n; ++i) {
          const uint32_t from = detail::load_bit(m, i) ? a : b;
          std::memmove(detail::ub() + d + i * sizeof(T), detail::ub() + from + i * sizeof(T), sizeof(T));
        }
      });
}

// dst[i] = bit i of selMask ? src0[i] : src1.
template <detail::Floating T, typename U>
  requires detail::one_of<U, uint8_t, uint16_t, uint32_t, uint64_t>
void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0,
            T src1, SELMODE selMode, uint32_t count, const Loc& loc = Loc::current()) {
  const ::acpu::SiteId site = detail::core().site("Select", loc);
  const uint64_t n = detail::checked_count(site, count), bytes = n * sizeof(T), mask_bytes = (n + 7) / 8;
  detail::need(selMode == SELMODE::VSEL_TENSOR_SCALAR_MODE, ::acpu::Kind::kLimit, site,
               "a tensor and a scalar need VSEL_TENSOR_SCALAR_MODE");
  detail::core().need_spare(8192, site);
  detail::need_aligned(site, "dst", dst);
  detail::need_aligned(site, "selMask", selMask);
  detail::need_aligned(site, "src0", src0);
  detail::need_apart(site, dst, bytes, selMask, mask_bytes, false);
  const uint32_t d = dst.acpu_address(), m = selMask.acpu_address(), a = src0.acpu_address();
  detail::core().issue(
      ::acpu::Pipe::kV, site,
      {detail::ub_access("dst", true, dst, bytes), detail::ub_access("selMask", false, selMask, mask_bytes),
       detail::ub_access("src0", false, src0, bytes)},
      [=] {
        for (uint64_t i = 0; i < n; ++i) {
          if (detail::load_bit(m, i)) {
            std::memmove(detail::ub() + d + i * sizeof(T), detail::ub() + a + i * sizeof(T), sizeof(T));
          } else {
            detail::store<T>(d + i * sizeof(T), src1);
          }
        }
      });
}

}  // namespace AscendC
