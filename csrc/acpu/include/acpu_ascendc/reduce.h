// Reductions.
#pragma once

#include "vector.h"

namespace AscendC {

namespace detail {

// Reduces `count` elements to dst[0], and the place of the first winner to dst[1] where asked for.
template <typename T, typename F>
void reduce(const char* api, const Loc& loc, const LocalTensor<T>& dst, const LocalTensor<T>& src,
            const LocalTensor<T>& temporary, int64_t count, bool index, F better) {
  const ::acpu::SiteId site = core().site(api, loc);
  const uint64_t n = checked_count(site, count), bytes = n * sizeof(T);
  need_aligned(site, "src", src);
  need_aligned(site, "sharedTmpBuffer", temporary);
  need_aligned(site, "dst", dst, 2 * sizeof(T));
  // One partial result (a value, or a value and a place) for each 256 bytes, in whole blocks.
  const uint64_t partials = (bytes + 255) / 256 * (index ? 2 : 1) * sizeof(T);
  auto scratch = ub_access("sharedTmpBuffer", true, temporary, AlignUp<uint64_t>(partials, 32));
  const uint32_t d = dst.acpu_address(), s = src.acpu_address();
  core().issue(::acpu::Pipe::kV, site,
               {ub_access("dst", true, dst, (index ? 2 : 1) * sizeof(T)), ub_access("src", false, src, bytes), scratch},
               [=] {
                 T best = load<T>(s);
                 uint64_t place = 0;
                 for (uint64_t i = 1; i < n; ++i) {
                   const T value = load<T>(s + i * sizeof(T));
                   if (better(best, value)) place = i;
                 }
                 store<T>(d, best);
                 if (!index) return;
                 if constexpr (sizeof(T) == 2) {
                   store<uint16_t>(d + 2, static_cast<uint16_t>(place));
                 } else {
                   store<uint32_t>(d + 4, static_cast<uint32_t>(place));
                 }
               });
  core().forget(scratch);
}

}  // namespace detail

// `better` updates the first operand and says whether it took the second.
template <detail::Floating T>
void ReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& sharedTmpBuffer,
               const int32_t count, bool calIndex = false, const Loc& loc = Loc::current()) {
  detail::reduce("ReduceMax", loc, dst, src, sharedTmpBuffer, count, calIndex,
                 [](T& best, T value) { return value > best ? (best = value, true) : false; });
}

template <detail::Floating T>
void ReduceMin(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& sharedTmpBuffer,
               const int32_t count, bool calIndex = false, const Loc& loc = Loc::current()) {
  detail::reduce("ReduceMin", loc, dst, src, sharedTmpBuffer, count, calIndex,
                 [](T& best, T value) { return value < best ? (best = value, true) : false; });
}

// In ascending order; the hardware adds by pairs, so sums that round may differ in their last bits.
template <detail::Floating T>
void ReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& sharedTmpBuffer,
               const int32_t count, const Loc& loc = Loc::current()) {
  detail::reduce("ReduceSum", loc, dst, src, sharedTmpBuffer, count, false,
                 [](T& sum, T value) { return sum = static_cast<T>(sum + value), false; });
}

namespace detail {

// The first `mask` elements of each repeat of 256 bytes, one result for each block of 32 bytes; 8 results a repeat.
template <typename T, typename F>
void block_reduce(const char* api, const Loc& loc, const LocalTensor<T>& dst, const LocalTensor<T>& src,
                  int32_t repeat, int32_t mask, int32_t dst_stride, int32_t src_block, int32_t src_repeat, F combine) {
  using ::acpu::Kind;
  const ::acpu::SiteId site = core().site(api, loc);
  constexpr uint32_t kLanes = 32 / sizeof(T);
  need(repeat >= 0 && repeat <= 255, Kind::kLimit, site, "repeatTime is outside 0..255");
  need(mask >= 1 && mask <= static_cast<int32_t>(8 * kLanes), Kind::kLimit, site, "mask is outside one repeat");
  need_aligned(site, "dst", dst, 8 * sizeof(T) < 32 ? 16 : 32);
  need_aligned(site, "src", src);
  std::vector<::acpu::Access> accesses;
  const uint32_t blocks = (mask + kLanes - 1) / kLanes;
  for (int32_t r = 0; r < repeat; ++r) {
    auto from = ub_access("src", false, src, 32, mask / kLanes, src_block * 32u);
    from.address += uint64_t(r) * src_repeat * 32;
    auto rest = ub_access("src", false, src, mask % kLanes * sizeof(T));
    rest.address = from.address + uint64_t(mask / kLanes) * src_block * 32;
    auto to = ub_access("dst", true, dst, blocks * sizeof(T));
    to.address += uint64_t(r) * dst_stride * 8 * sizeof(T);
    accesses.insert(accesses.end(), {from, rest, to});
  }
  const uint32_t d = dst.acpu_address(), s = src.acpu_address();
  core().issue(::acpu::Pipe::kV, site, accesses, [=] {
    for (uint32_t r = 0; r < static_cast<uint32_t>(repeat); ++r) {
      for (uint32_t block = 0; block < blocks; ++block) {
        const uint32_t from = s + (r * src_repeat + block * src_block) * 32;
        T result = load<T>(from);
        for (uint32_t lane = 1; lane < kLanes && block * kLanes + lane < static_cast<uint32_t>(mask); ++lane) {
          result = combine(result, load<T>(from + lane * sizeof(T)));
        }
        store<T>(d + (r * dst_stride * 8 + block) * sizeof(T), result);
      }
    }
  });
}

}  // namespace detail

template <detail::Floating T>
void BlockReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t repeatTime, const int32_t mask,
                    const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride,
                    const Loc& loc = Loc::current()) {
  detail::block_reduce("BlockReduceMax", loc, dst, src, repeatTime, mask, dstRepStride, srcBlkStride, srcRepStride,
                       [](T a, T b) { return a > b ? a : b; });
}

template <detail::Floating T>
void BlockReduceMin(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t repeatTime, const int32_t mask,
                    const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride,
                    const Loc& loc = Loc::current()) {
  detail::block_reduce("BlockReduceMin", loc, dst, src, repeatTime, mask, dstRepStride, srcBlkStride, srcRepStride,
                       [](T a, T b) { return a < b ? a : b; });
}

template <detail::Floating T>
void BlockReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t repeatTime, const int32_t mask,
                    const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride,
                    const Loc& loc = Loc::current()) {
  detail::block_reduce("BlockReduceSum", loc, dst, src, repeatTime, mask, dstRepStride, srcBlkStride, srcRepStride,
                       [](T a, T b) { return static_cast<T>(a + b); });
}

}  // namespace AscendC
