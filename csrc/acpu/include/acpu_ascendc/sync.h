// Flags, barriers, SyncAll and the scalar data cache.
#pragma once

#include <utility>

#include "pipe.h"
#include "tensor.h"

namespace AscendC {

template <HardEvent event>
void SetFlag(int32_t eventID, const Loc& loc = Loc::current()) {
  const auto [from, to] = detail::event_pipes(event);
  detail::core().set_flag(from, to, eventID, detail::core().site("SetFlag", loc));
}

template <HardEvent event>
void WaitFlag(int32_t eventID, const Loc& loc = Loc::current()) {
  const auto [from, to] = detail::event_pipes(event);
  detail::core().wait_flag(from, to, eventID, detail::core().site("WaitFlag", loc));
}

template <pipe_t pipe>
void PipeBarrier(const Loc& loc = Loc::current()) {
  static_assert(pipe == PIPE_S || pipe == PIPE_V || pipe == PIPE_MTE2 || pipe == PIPE_MTE3 || pipe == PIPE_ALL,
                "an AI-vector core has the pipes S, V, MTE2 and MTE3");
  const ::acpu::SiteId site = detail::core().site("PipeBarrier", loc);
  if constexpr (pipe == PIPE_ALL) {
    detail::core().barrier_all(site);
  } else {
    constexpr ::acpu::Pipe kPipe = pipe == PIPE_S      ? ::acpu::Pipe::kS
                                   : pipe == PIPE_V    ? ::acpu::Pipe::kV
                                   : pipe == PIPE_MTE2 ? ::acpu::Pipe::kMte2
                                                       : ::acpu::Pipe::kMte3;
    detail::core().barrier(kPipe, site);
  }
}

// All cores; hard synchronisation.
template <bool isAIVOnly = true>
void SyncAll(const Loc& loc = Loc::current()) {
  detail::core().sync_all(detail::core().site("SyncAll", loc));
}

template <typename T, CacheLine entireType, DcciDst dcciDst = DcciDst::CACHELINE_ALL>
void DataCacheCleanAndInvalid(const GlobalTensor<T>& dst, const Loc& loc = Loc::current()) {
  detail::core().clean_cache(detail::core().site("DataCacheCleanAndInvalid", loc), dst.GetPhyAddr(),
                             entireType == CacheLine::ENTIRE_DATA_CACHE);
}

}  // namespace AscendC
