// Element-wise vector instructions on the first `count` elements.
#pragma once

#include <cmath>
#include <limits>

#include "tensor.h"

namespace AscendC {

namespace detail {

template <typename T, typename... Allowed>
concept one_of = (std::is_same_v<T, Allowed> || ...);

template <typename T>
concept Arithmetic = one_of<T, half, float, int16_t, int32_t>;
template <typename T>
concept Shiftable = one_of<T, uint16_t, uint32_t, int16_t, int32_t>;
template <typename T>
concept Bitwise = one_of<T, int16_t, uint16_t>;
template <typename T>
concept Fillable = one_of<T, half, bfloat16_t, float, int16_t, uint16_t, int32_t, uint32_t>;
template <typename T>
concept Floating = one_of<T, half, float>;

// Integers wrap around, without the undefined behaviour of signed overflow.
template <typename T, typename F>
T wrap(T a, T b, F f) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<U>(f(uint64_t{static_cast<U>(a)}, uint64_t{static_cast<U>(b)})));
  } else {
    return static_cast<T>(f(a, b));
  }
}

// Operands of one instruction are the same range or apart.
template <typename A, typename B>
void need_apart(::acpu::SiteId site, const LocalTensor<A>& dst, uint64_t dst_bytes, const LocalTensor<B>& src,
                uint64_t src_bytes, bool same_allowed = true) {
  const uint64_t a = dst.acpu_address(), b = src.acpu_address();
  const bool apart = a + dst_bytes <= b || b + src_bytes <= a;
  const bool same = same_allowed && a == b && dst_bytes == src_bytes;
  need(apart || same, ::acpu::Kind::kOverlap, site, "dst overlaps a source that starts elsewhere");
}

inline uint64_t checked_count(::acpu::SiteId site, int64_t count) {
  need(count > 0, ::acpu::Kind::kLimit, site, "count must be positive");
  return count > 0 ? static_cast<uint64_t>(count) : 0;
}

template <typename D, typename S, typename F>
void unary(const char* api, const Loc& loc, const LocalTensor<D>& dst, const LocalTensor<S>& src, int64_t count, F f) {
  const ::acpu::SiteId site = core().site(api, loc);
  const uint64_t n = checked_count(site, count);
  need_aligned(site, "dst", dst);
  need_aligned(site, "src", src);
  need_apart(site, dst, n * sizeof(D), src, n * sizeof(S));
  const uint32_t d = dst.acpu_address(), s = src.acpu_address();
  core().issue(::acpu::Pipe::kV, site,
               {ub_access("dst", true, dst, n * sizeof(D)), ub_access("src", false, src, n * sizeof(S))}, [=] {
                 for (uint64_t i = 0; i < n; ++i) store<D>(d + i * sizeof(D), f(load<S>(s + i * sizeof(S))));
               });
}

template <typename T, typename F>
void binary(const char* api, const Loc& loc, const LocalTensor<T>& dst, const LocalTensor<T>& src0,
            const LocalTensor<T>& src1, int64_t count, F f) {
  const ::acpu::SiteId site = core().site(api, loc);
  const uint64_t n = checked_count(site, count), bytes = n * sizeof(T);
  need_aligned(site, "dst", dst);
  need_aligned(site, "src0", src0);
  need_aligned(site, "src1", src1);
  need_apart(site, dst, bytes, src0, bytes);
  need_apart(site, dst, bytes, src1, bytes);
  const uint32_t d = dst.acpu_address(), a = src0.acpu_address(), b = src1.acpu_address();
  core().issue(::acpu::Pipe::kV, site,
               {ub_access("dst", true, dst, bytes), ub_access("src0", false, src0, bytes),
                ub_access("src1", false, src1, bytes)},
               [=] {
                 for (uint64_t at = 0; at < bytes; at += sizeof(T)) {
                   store<T>(d + at, f(load<T>(a + at), load<T>(b + at)));
                 }
               });
}

template <typename T>
double round_to(double value, T mode) {
  switch (mode) {
    case RoundMode::CAST_RINT: return std::nearbyint(value);
    case RoundMode::CAST_FLOOR: return std::floor(value);
    case RoundMode::CAST_CEIL: return std::ceil(value);
    case RoundMode::CAST_ROUND: return std::round(value);
    default: return std::trunc(value);
  }
}

template <typename D, typename S>
D convert(S value, RoundMode mode) {
  if constexpr (std::is_integral_v<D>) {
    if constexpr (std::is_integral_v<S>) {
      return static_cast<D>(value);
    } else {
      const double rounded = round_to(static_cast<double>(static_cast<float>(value)), mode);
      if (std::isnan(rounded)) return 0;
      if (rounded <= static_cast<double>(std::numeric_limits<D>::min())) return std::numeric_limits<D>::min();
      if (rounded >= static_cast<double>(std::numeric_limits<D>::max())) return std::numeric_limits<D>::max();
      return static_cast<D>(rounded);
    }
  } else if constexpr (std::is_same_v<D, S>) {
    return static_cast<D>(round_to(static_cast<double>(static_cast<float>(value)), mode));
  } else if constexpr (std::is_integral_v<S>) {
    return static_cast<D>(static_cast<float>(value));
  } else {
    return static_cast<D>(static_cast<float>(value));
  }
}

// Source and target types of Cast.
template <typename S, typename D>
concept Castable =
    (one_of<S, float> && one_of<D, float, half, bfloat16_t, int16_t, int32_t, int64_t>) ||
    (one_of<S, half> && one_of<D, float, int8_t, uint8_t, int16_t, int32_t>) ||
    (one_of<S, bfloat16_t> && one_of<D, float, int32_t>) || (one_of<S, int8_t, uint8_t> && one_of<D, half>) ||
    (one_of<S, int16_t> && one_of<D, half, float>) || (one_of<S, int32_t> && one_of<D, float, int16_t, int64_t>) ||
    (one_of<S, int64_t> && one_of<D, float, int32_t>);

}  // namespace detail

template <detail::Arithmetic T>
void Add(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count,
         const Loc& loc = Loc::current()) {
  detail::binary("Add", loc, dst, src0, src1, count,
                 [](T a, T b) { return detail::wrap(a, b, [](auto x, auto y) { return x + y; }); });
}

template <detail::Arithmetic T>
void Sub(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count,
         const Loc& loc = Loc::current()) {
  detail::binary("Sub", loc, dst, src0, src1, count,
                 [](T a, T b) { return detail::wrap(a, b, [](auto x, auto y) { return x - y; }); });
}

template <detail::Arithmetic T>
void Mul(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count,
         const Loc& loc = Loc::current()) {
  detail::binary("Mul", loc, dst, src0, src1, count,
                 [](T a, T b) { return detail::wrap(a, b, [](auto x, auto y) { return x * y; }); });
}

template <detail::Arithmetic T>
void Max(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count,
         const Loc& loc = Loc::current()) {
  detail::binary("Max", loc, dst, src0, src1, count, [](T a, T b) { return a > b ? a : b; });
}

template <detail::Arithmetic T>
void Min(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count,
         const Loc& loc = Loc::current()) {
  detail::binary("Min", loc, dst, src0, src1, count, [](T a, T b) { return a < b ? a : b; });
}

template <detail::Bitwise T>
void And(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count,
         const Loc& loc = Loc::current()) {
  detail::binary("And", loc, dst, src0, src1, count, [](T a, T b) { return static_cast<T>(a & b); });
}

template <detail::Bitwise T>
void Or(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count,
        const Loc& loc = Loc::current()) {
  detail::binary("Or", loc, dst, src0, src1, count, [](T a, T b) { return static_cast<T>(a | b); });
}

template <detail::Bitwise T>
void Not(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t& count, const Loc& loc = Loc::current()) {
  detail::unary("Not", loc, dst, src, count, [](T a) { return static_cast<T>(~a); });
}

template <detail::Arithmetic T>
void Adds(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue,
          const int32_t& count, const Loc& loc = Loc::current()) {
  const T scalar = scalarValue;
  detail::unary("Adds", loc, dst, src, count,
                [scalar](T a) { return detail::wrap(a, scalar, [](auto x, auto y) { return x + y; }); });
}

template <detail::Arithmetic T>
void Muls(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue,
          const int32_t& count, const Loc& loc = Loc::current()) {
  const T scalar = scalarValue;
  detail::unary("Muls", loc, dst, src, count,
                [scalar](T a) { return detail::wrap(a, scalar, [](auto x, auto y) { return x * y; }); });
}

template <detail::Arithmetic T>
void Maxs(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue,
          const int32_t& count, const Loc& loc = Loc::current()) {
  const T scalar = scalarValue;
  detail::unary("Maxs", loc, dst, src, count, [scalar](T a) { return a > scalar ? a : scalar; });
}

template <detail::Arithmetic T>
void Mins(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue,
          const int32_t& count, const Loc& loc = Loc::current()) {
  const T scalar = scalarValue;
  detail::unary("Mins", loc, dst, src, count, [scalar](T a) { return a < scalar ? a : scalar; });
}

// By 0 to the width of the type.
template <detail::Shiftable T>
void ShiftLeft(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue,
               const int32_t& count, const Loc& loc = Loc::current()) {
  const auto shift = static_cast<int64_t>(scalarValue);
  detail::need(shift >= 0 && shift <= static_cast<int64_t>(sizeof(T) * 8), ::acpu::Kind::kLimit,
               detail::core().site("ShiftLeft", loc), "shift distance outside the width of the type");
  detail::unary("ShiftLeft", loc, dst, src, count, [shift](T a) {
    return static_cast<T>(static_cast<uint64_t>(static_cast<std::make_unsigned_t<T>>(a)) << (shift & 63));
  });
}

// Signed types keep their sign.
template <detail::Shiftable T>
void ShiftRight(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue,
                const int32_t& count, const Loc& loc = Loc::current()) {
  const auto shift = static_cast<int64_t>(scalarValue);
  detail::need(shift >= 0 && shift <= static_cast<int64_t>(sizeof(T) * 8), ::acpu::Kind::kLimit,
               detail::core().site("ShiftRight", loc), "shift distance outside the width of the type");
  detail::unary("ShiftRight", loc, dst, src, count,
                [shift](T a) { return static_cast<T>(static_cast<int64_t>(a) >> (shift & 63)); });
}

template <detail::Fillable T>
void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, const int32_t& count,
               const Loc& loc = Loc::current()) {
  const ::acpu::SiteId site = detail::core().site("Duplicate", loc);
  const uint64_t n = detail::checked_count(site, count);
  detail::need_aligned(site, "dst", dst);
  const uint32_t d = dst.acpu_address();
  const T value = scalarValue;
  detail::core().issue(::acpu::Pipe::kV, site, {detail::ub_access("dst", true, dst, n * sizeof(T))}, [=] {
    for (uint64_t i = 0; i < n; ++i) detail::store<T>(d + i * sizeof(T), value);
  });
}

// first, first + 1, ...
template <typename T>
  requires detail::one_of<T, half, float, int16_t, int32_t>
void CreateVecIndex(LocalTensor<T> dst, const T& firstValue, uint32_t count,
                    const Loc& loc = Loc::current()) {
  const ::acpu::SiteId site = detail::core().site("CreateVecIndex", loc);
  const uint64_t n = detail::checked_count(site, count);
  detail::need_aligned(site, "dst", dst);
  const uint32_t d = dst.acpu_address();
  const T first = firstValue;
  detail::core().issue(::acpu::Pipe::kV, site, {detail::ub_access("dst", true, dst, n * sizeof(T))}, [=] {
    for (uint64_t i = 0; i < n; ++i) {
      detail::store<T>(d + i * sizeof(T), detail::wrap(first, static_cast<T>(i), [](auto x, auto y) { return x + y; }));
    }
  });
}

// first, first + diff, first + 2 diff, ...
template <typename T>
  requires detail::one_of<T, half, float, int16_t, int32_t>
void ArithProgression(const LocalTensor<T>& dst, const T firstValue, const T diffValue, const int32_t count,
                      const Loc& loc = Loc::current()) {
  const ::acpu::SiteId site = detail::core().site("ArithProgression", loc);
  const uint64_t n = detail::checked_count(site, count);
  detail::need_aligned(site, "dst", dst);
  const uint32_t d = dst.acpu_address();
  detail::core().issue(::acpu::Pipe::kV, site, {detail::ub_access("dst", true, dst, n * sizeof(T))}, [=] {
    for (uint64_t i = 0; i < n; ++i) {
      const T step = detail::wrap(diffValue, static_cast<T>(i), [](auto x, auto y) { return x * y; });
      detail::store<T>(d + i * sizeof(T), detail::wrap(firstValue, step, [](auto x, auto y) { return x + y; }));
    }
  });
}

template <typename D, typename S>
  requires detail::Castable<S, D>
void Cast(const LocalTensor<D>& dst, const LocalTensor<S>& src, const RoundMode& roundMode, const uint32_t count,
          const Loc& loc = Loc::current()) {
  const RoundMode mode = roundMode;
  if constexpr (std::is_integral_v<D> && !std::is_integral_v<S>) {
    detail::need(mode != RoundMode::CAST_NONE, ::acpu::Kind::kLimit, detail::core().site("Cast", loc),
                 "CAST_NONE from a floating type to an integer");
  }
  detail::unary("Cast", loc, dst, src, count, [mode](S value) { return detail::convert<D>(value, mode); });
}

}  // namespace AscendC
