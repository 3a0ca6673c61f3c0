// Gather, Gatherb, GatherMask and Brcb: instructions whose lanes move.
#pragma once

#include "compare.h"

namespace AscendC {

using GatherRepeatParams = BrcbRepeatParams;

namespace detail {

template <typename T>
concept Gatherable = one_of<T, half, bfloat16_t, float, int16_t, uint16_t, int32_t, uint32_t>;

// A source whose elements are picked by data: ordered as a whole, checked element by element when it takes effect.
template <typename T>
::acpu::Access picked_access(const LocalTensor<T>& src) {
  const uint32_t end = src.acpu_extent().end;
  const uint64_t bytes = end > src.acpu_address() ? end - src.acpu_address() : 0;
  ::acpu::Access access = ub_access("src", false, src, bytes);
  access.picked = true;
  return access;
}

}  // namespace detail

// dst[i] = the element srcBaseAddr + srcOffset[i] bytes after the start of src.
template <detail::Gatherable T>
void Gather(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<uint32_t>& srcOffset,
            const uint32_t srcBaseAddr, const uint32_t count, const Loc& loc = Loc::current()) {
  const ::acpu::SiteId site = detail::core().site("Gather", loc);
  const uint64_t n = detail::checked_count(site, count);
  detail::need_aligned(site, "dst", dst);
  detail::need_aligned(site, "src", src);
  detail::need_aligned(site, "srcOffset", srcOffset);
  detail::need_apart(site, dst, n * sizeof(T), srcOffset, n * 4, false);
  const uint32_t d = dst.acpu_address(), o = srcOffset.acpu_address();
  const ::acpu::Access source = detail::picked_access(src);
  detail::core().issue(
      ::acpu::Pipe::kV, site,
      {detail::ub_access("dst", true, dst, n * sizeof(T)), detail::ub_access("srcOffset", false, srcOffset, n * 4),
       source},
      [=] {
        for (uint64_t i = 0; i < n; ++i) {
          const uint64_t at = uint64_t{srcBaseAddr} + detail::load<uint32_t>(o + i * 4);
          detail::need(at % sizeof(T) == 0, ::acpu::Kind::kAlignment, site, "an offset is no multiple of the element");
          if (!detail::core().picked_inside(site, source, at, sizeof(T))) continue;
          detail::store<T>(d + i * sizeof(T), detail::load<T>(static_cast<uint32_t>(source.address + at)));
        }
      });
}

// Blocks of 32 bytes: block b of repeat r comes from offset[8 r + b] bytes after the start of src0.
template <typename T>
  requires detail::one_of<T, uint16_t, uint32_t>
void Gatherb(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<uint32_t>& offset,
             const uint8_t repeatTime, const GatherRepeatParams& repeatParams, const Loc& loc = Loc::current()) {
  const ::acpu::SiteId site = detail::core().site("Gatherb", loc);
  detail::need_aligned(site, "dst", dst);
  detail::need_aligned(site, "src0", src0);
  detail::need_aligned(site, "offset", offset);
  const ::acpu::Access source = detail::picked_access(src0);
  const uint32_t d = dst.acpu_address(), o = offset.acpu_address();
  detail::need_apart(site, dst, uint64_t{repeatTime} * 256, offset, uint64_t{repeatTime} * 32, false);
  detail::need(d != src0.acpu_address(), ::acpu::Kind::kOverlap, site, "dst and src0 are the same memory");
  // A block stride of 0 counts as 1.
  const uint32_t block_stride = (repeatParams.dstBlkStride ? repeatParams.dstBlkStride : 1) * 32u;
  const uint32_t repeat_stride = repeatParams.dstRepStride * 32u;
  std::vector<::acpu::Access> accesses{detail::ub_access("offset", false, offset, uint64_t{repeatTime} * 32), source};
  for (uint32_t repeat = 0; repeat < repeatTime; ++repeat) {
    accesses.push_back(detail::ub_access("dst", true, dst[repeat * repeat_stride / sizeof(T)], 32, 8, block_stride));
  }
  detail::core().issue(::acpu::Pipe::kV, site, accesses, [=] {
    for (uint32_t i = 0; i < repeatTime * 8u; ++i) {
      const uint32_t at = detail::load<uint32_t>(o + i * 4);
      detail::need(at % 32 == 0, ::acpu::Kind::kAlignment, site, "an offset is not a multiple of 32 bytes");
      if (!detail::core().picked_inside(site, source, at, 32)) continue;
      uint8_t* to = detail::ub() + d + i / 8 * repeat_stride + i % 8 * block_stride;
      std::memmove(to, detail::ub() + source.address + at, 32);
    }
  });
}

// Each of 8 elements a repeat fills one block of 32 bytes.
template <detail::Gatherable T>
void Brcb(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const uint8_t repeatTime,
          const BrcbRepeatParams& repeatParams, const Loc& loc = Loc::current()) {
  const ::acpu::SiteId site = detail::core().site("Brcb", loc);
  detail::need_aligned(site, "dst", dst);
  detail::need_aligned(site, "src0", src0);
  const uint32_t d = dst.acpu_address(), s = src0.acpu_address();
  detail::need(d != s, ::acpu::Kind::kOverlap, site, "dst and src0 are the same memory");
  const uint32_t block_stride = (repeatParams.dstBlkStride ? repeatParams.dstBlkStride : 1) * 32u;
  const uint32_t repeat_stride = repeatParams.dstRepStride * 32u;
  std::vector<::acpu::Access> accesses{detail::ub_access("src0", false, src0, uint64_t{repeatTime} * 8 * sizeof(T))};
  for (uint32_t repeat = 0; repeat < repeatTime; ++repeat) {
    accesses.push_back(detail::ub_access("dst", true, dst[repeat * repeat_stride / sizeof(T)], 32, 8, block_stride));
  }
  detail::core().issue(::acpu::Pipe::kV, site, accesses, [=] {
    for (uint32_t i = 0; i < repeatTime * 8u; ++i) {
      const T value = detail::load<T>(s + i * sizeof(T));
      const uint32_t block = d + i / 8 * repeat_stride + i % 8 * block_stride;
      for (uint32_t at = 0; at < 32; at += sizeof(T)) detail::store<T>(block + at, value);
    }
  });
}

namespace detail {

struct GatherMaskShape {
  uint64_t per_repeat;  // source elements
  uint32_t repeats;
  uint32_t block_stride;
  uint32_t repeat_stride;
};

// Offset of element e of repeat r from the source's start.
template <typename T>
uint64_t gather_mask_source(const GatherMaskShape& shape, uint64_t r, uint64_t e) {
  constexpr uint32_t kLanes = 32 / sizeof(T);
  return r * shape.repeat_stride + e / kLanes * shape.block_stride + e % kLanes * sizeof(T);
}

template <typename T>
GatherMaskShape gather_mask_shape(::acpu::SiteId site, bool counter, uint32_t mask, const GatherMaskParams& params) {
  need(!counter || mask > 0, ::acpu::Kind::kLimit, site, "mask is 0");
  return {counter ? mask : 256 / sizeof(T), params.repeatTimes, params.src0BlockStride * 32u,
          params.src0RepeatStride * 32u};
}

// Packs the elements whose `chosen(repeat, element)` holds to the front of dst. The count goes to the scalar unit,
// which therefore waits for the instruction; that wait orders nothing else.
template <typename T, typename F>
uint64_t gather_masked(::acpu::SiteId site, const LocalTensor<T>& dst, const LocalTensor<T>& src,
                       const GatherMaskShape& shape, std::vector<::acpu::Access> accesses, F chosen) {
  need_aligned(site, "dst", dst);
  need_aligned(site, "src0", src);
  for (uint64_t r = 0; r < shape.repeats; ++r) {
    constexpr uint32_t kLanes = 32 / sizeof(T);
    for (uint64_t e = 0; e < shape.per_repeat; e += kLanes) {
      const uint64_t lanes = std::min<uint64_t>(kLanes, shape.per_repeat - e);
      auto block = ub_access("src0", false, src, lanes * sizeof(T));
      block.address += gather_mask_source<T>(shape, r, e);
      accesses.push_back(block);
    }
  }
  core().settle(::acpu::Pipe::kV);  // so that the mask is there to be counted
  std::vector<uint32_t> from;
  if (core().reachable(accesses)) {
    for (uint64_t r = 0; r < shape.repeats; ++r) {
      for (uint64_t e = 0; e < shape.per_repeat; ++e) {
        const uint64_t at = src.acpu_address() + gather_mask_source<T>(shape, r, e);
        if (chosen(r, e)) from.push_back(static_cast<uint32_t>(at));
      }
    }
  }
  accesses.push_back(ub_access("dst", true, dst, from.size() * sizeof(T)));
  const uint32_t d = dst.acpu_address();
  core().issue(::acpu::Pipe::kV, site, accesses, [&] {
    for (size_t i = 0; i < from.size(); ++i) store<T>(d + i * sizeof(T), load<T>(from[i]));
  });
  core().settle(::acpu::Pipe::kV);
  return from.size();
}

}  // namespace detail

// By a bit mask in src1Pattern. reduceMode: `mask` elements a repeat; otherwise 256 bytes a repeat.
template <detail::Gatherable T, typename U>
  requires(detail::one_of<U, uint16_t, uint32_t> && sizeof(T) == sizeof(U))
void GatherMask(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<U>& src1Pattern,
                const bool reduceMode, const uint32_t mask, const GatherMaskParams& gatherMaskParams, uint64_t& rsvdCnt,
                const Loc& loc = Loc::current()) {
  const ::acpu::SiteId site = detail::core().site("GatherMask", loc);
  detail::need_aligned(site, "src1Pattern", src1Pattern);
  const auto shape = detail::gather_mask_shape<T>(site, reduceMode, mask, gatherMaskParams);
  const uint32_t stride = gatherMaskParams.src1RepeatStride * 32u, m = src1Pattern.acpu_address();
  std::vector<::acpu::Access> accesses{
      detail::ub_access("src1Pattern", false, src1Pattern, (shape.per_repeat + 7) / 8, shape.repeats, stride)};
  rsvdCnt = detail::gather_masked(site, dst, src0, shape, std::move(accesses), [&](uint64_t r, uint64_t e) {
    return detail::load_bit(static_cast<uint32_t>(m + r * stride), e);
  });
}

// By a built-in pattern: 1, 2: every second element from the first or second; 3..6: every fourth; 7: all.
template <detail::Gatherable T>
void GatherMask(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const uint8_t src1Pattern, const bool reduceMode,
                const uint32_t mask, const GatherMaskParams& gatherMaskParams, uint64_t& rsvdCnt,
                const Loc& loc = Loc::current()) {
  const ::acpu::SiteId site = detail::core().site("GatherMask", loc);
  detail::need(src1Pattern >= 1 && src1Pattern <= 7, ::acpu::Kind::kLimit, site, "src1Pattern is outside 1..7");
  const auto shape = detail::gather_mask_shape<T>(site, reduceMode, mask, gatherMaskParams);
  rsvdCnt = detail::gather_masked(site, dst, src0, shape, {}, [&](uint64_t, uint64_t e) {
    if (src1Pattern == 7) return true;
    return src1Pattern <= 2 ? e % 2 == src1Pattern - 1u : e % 4 == src1Pattern - 3u;
  });
}

}  // namespace AscendC
