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

// Software synchronisation: 32 bytes a core of both workspaces, that of global memory zeroed before.
template <bool isAIVOnly = true>
void SyncAll(const GlobalTensor<int32_t>& gmWorkspace, const LocalTensor<int32_t>& ubWorkspace,
             const int32_t usedCores = 0, const Loc& loc = Loc::current()) {
  const ::acpu::SiteId site = detail::core().site("SyncAll", loc);
  const uint64_t bytes = static_cast<uint64_t>(detail::core().count()) * 32;
  detail::need(usedCores == 0 || usedCores == detail::core().count(), ::acpu::Kind::kLimit, site,
               "synchronising a part of the cores is not modelled");
  detail::need(gmWorkspace.GetSize() == 0 || gmWorkspace.GetSize() * 4 >= bytes, ::acpu::Kind::kLimit, site,
               "gmWorkspace is smaller than 32 bytes a core");
  detail::need(ubWorkspace.GetLength() >= bytes, ::acpu::Kind::kLimit, site,
               "ubWorkspace is smaller than 32 bytes a core");
  detail::core().sync_all(site);
}

template <typename T, CacheLine entireType, DcciDst dcciDst = DcciDst::CACHELINE_ALL>
void DataCacheCleanAndInvalid(const GlobalTensor<T>& dst, const Loc& loc = Loc::current()) {
  detail::core().clean_cache(detail::core().site("DataCacheCleanAndInvalid", loc), dst.GetPhyAddr(),
                             entireType == CacheLine::ENTIRE_DATA_CACHE);
}

}  // namespace AscendC
