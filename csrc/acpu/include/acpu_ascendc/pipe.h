// TPipe, TQue, TQueBind and TBuf.
#pragma once

#include <memory>
#include <utility>

#include "../../queue.h"
#include "tensor.h"

namespace AscendC {

namespace detail {

constexpr std::pair<::acpu::Pipe, ::acpu::Pipe> event_pipes(HardEvent event) {
  using ::acpu::Pipe;
  switch (event) {
    case HardEvent::MTE2_V: return {Pipe::kMte2, Pipe::kV};
    case HardEvent::V_MTE2: return {Pipe::kV, Pipe::kMte2};
    case HardEvent::MTE3_V: return {Pipe::kMte3, Pipe::kV};
    case HardEvent::V_MTE3: return {Pipe::kV, Pipe::kMte3};
    case HardEvent::MTE3_MTE2: return {Pipe::kMte3, Pipe::kMte2};
    case HardEvent::MTE2_MTE3: return {Pipe::kMte2, Pipe::kMte3};
    case HardEvent::S_V: return {Pipe::kS, Pipe::kV};
    case HardEvent::V_S: return {Pipe::kV, Pipe::kS};
    case HardEvent::S_MTE2: return {Pipe::kS, Pipe::kMte2};
    case HardEvent::MTE2_S: return {Pipe::kMte2, Pipe::kS};
    case HardEvent::S_MTE3: return {Pipe::kS, Pipe::kMte3};
    case HardEvent::MTE3_S: return {Pipe::kMte3, Pipe::kS};
    case HardEvent::V_V: return {Pipe::kV, Pipe::kV};
  }
  return {Pipe::kV, Pipe::kV};
}

// Pipes that fill and use the buffers of a queue from `src` to `dst`.
constexpr ::acpu::QueuePipes queue_pipes(TPosition src, TPosition dst) {
  using ::acpu::Pipe;
  if (src == TPosition::GM) return {Pipe::kMte2, Pipe::kV};
  if (dst == TPosition::GM) return {Pipe::kV, Pipe::kMte3};
  if (src == TPosition::VECIN && dst == TPosition::VECOUT) return {Pipe::kMte2, Pipe::kMte3};
  return {Pipe::kV, Pipe::kV, false};  // between vector instructions: PipeBarrier's business
}

}  // namespace detail

class TPipe;

template <TPosition src, TPosition dst, int32_t depth>
class TQueBind {
 public:
  template <typename T>
  LocalTensor<T> AllocTensor(const Loc& loc = Loc::current()) {
    const ::acpu::SiteId site = detail::core().site("AllocTensor", loc);
    return LocalTensor<T>(state(site).alloc(site), src == TPosition::GM ? dst : src);
  }
  template <typename T>
  void FreeTensor(LocalTensor<T>& tensor, const Loc& loc = Loc::current()) {
    const ::acpu::SiteId site = detail::core().site("FreeTensor", loc);
    state(site).free(tensor.acpu_extent(), site);
  }
  template <typename T>
  bool EnQue(const LocalTensor<T>& tensor, const Loc& loc = Loc::current()) {
    const ::acpu::SiteId site = detail::core().site("EnQue", loc);
    state(site).enqueue(tensor.acpu_extent(), site);
    return true;
  }
  template <typename T>
  LocalTensor<T> DeQue(const Loc& loc = Loc::current()) {
    const ::acpu::SiteId site = detail::core().site("DeQue", loc);
    return LocalTensor<T>(state(site).dequeue(site), dst == TPosition::GM ? src : dst);
  }
  bool VacantInQue() { return state_ && state_->queued() < static_cast<uint32_t>(depth); }
  bool HasTensorInQue() { return state_ && state_->queued() > 0; }
  int32_t GetTensorCountInQue() { return state_ ? static_cast<int32_t>(state_->queued()) : 0; }
  bool HasIdleBuffer() { return state_ && state_->has_idle(); }

 private:
  friend class TPipe;

  ::acpu::QueueState& state(::acpu::SiteId site) {
    if (!state_) {
      detail::core().report(::acpu::Kind::kQueue, site, "the queue has no buffers: InitBuffer is missing");
      detail::core().stop();
    }
    return *state_;
  }

  ::acpu::QueueState* state_ = nullptr;
};

namespace detail {
constexpr TPosition queue_source(TPosition p) { return p == TPosition::VECIN ? TPosition::GM : p; }
constexpr TPosition queue_target(TPosition p) { return p == TPosition::VECOUT ? TPosition::GM : p; }
}  // namespace detail

template <TPosition pos, int32_t depth>
class TQue : public TQueBind<detail::queue_source(pos), detail::queue_target(pos), depth> {};

template <TPosition pos = TPosition::LCM>
class TBuf {
 public:
  // Without a length: the whole buffer.
  template <typename T>
  LocalTensor<T> Get(const Loc& = Loc::current()) {
    return LocalTensor<T>(extent_, pos);
  }
  template <typename T>
  LocalTensor<T> Get(uint32_t len, const Loc& loc = Loc::current()) {
    return part<T>(len, 0, loc);
  }
  template <typename T>
  LocalTensor<T> GetWithOffset(uint32_t size, uint32_t bufOffset, const Loc& loc = Loc::current()) {
    return part<T>(size, bufOffset, loc);
  }

 private:
  friend class TPipe;

  template <typename T>
  LocalTensor<T> part(uint32_t elements, uint32_t offset, const Loc& loc) {
    ::acpu::UbExtent extent = extent_;
    const uint64_t end = uint64_t{extent_.begin} + offset + uint64_t{elements} * sizeof(T);
    if (end > extent_.end) {
      detail::core().report(::acpu::Kind::kUbOutOfBounds, detail::core().site("TBuf::Get", loc),
                            std::to_string(end - extent_.begin) + " bytes of a buffer of " +
                                std::to_string(extent_.end - extent_.begin));
    }
    extent.begin += offset;
    extent.end = static_cast<uint32_t>(end < extent_.end ? end : extent_.end);
    return LocalTensor<T>(extent, pos);
  }

  ::acpu::UbExtent extent_{};
};

class TPipe {
 public:
  explicit TPipe(const Loc& loc = Loc::current())
      : state_(std::make_unique<::acpu::PipeState>(detail::core(), detail::core().site("TPipe", loc))) {
    current() = this;
  }
  ~TPipe() {
    if (current() == this) current() = nullptr;
  }
  TPipe(const TPipe&) = delete;
  TPipe& operator=(const TPipe&) = delete;

  template <TPosition src, TPosition dst, int32_t depth>
  bool InitBuffer(TQueBind<src, dst, depth>& que, uint8_t num, uint32_t len, const Loc& loc = Loc::current()) {
    static_assert(depth > 0, "the in-place queues of depth 0 are not modelled");
    const ::acpu::SiteId site = detail::core().site("InitBuffer", loc);
    que.state_ = state_->init_queue(detail::queue_pipes(src, dst), depth, num, len, site);
    return true;
  }
  template <TPosition pos>
  bool InitBuffer(TBuf<pos>& buf, uint32_t len, const Loc& loc = Loc::current()) {
    buf.extent_ = state_->init_buffer(len, detail::core().site("InitBuffer", loc));
    return true;
  }
  void Reset(const Loc& loc = Loc::current()) { state_->reset(detail::core().site("TPipe::Reset", loc)); }
  void Destroy() { state_->destroy(); }

  template <HardEvent event>
  TEventID AllocEventID(const Loc& loc = Loc::current()) {
    const auto [from, to] = detail::event_pipes(event);
    return static_cast<TEventID>(detail::core().alloc_event(from, to, detail::core().site("AllocEventID", loc)));
  }
  template <HardEvent event>
  void ReleaseEventID(TEventID id, const Loc& loc = Loc::current()) {
    const auto [from, to] = detail::event_pipes(event);
    detail::core().release_event(from, to, id, detail::core().site("ReleaseEventID", loc));
  }
  template <HardEvent event>
  TEventID FetchEventID(const Loc& loc = Loc::current()) {
    return FetchEventID(event, loc);
  }
  TEventID FetchEventID(HardEvent event, const Loc& loc = Loc::current()) {
    const auto [from, to] = detail::event_pipes(event);
    return static_cast<TEventID>(detail::core().fetch_event(from, to, detail::core().site("FetchEventID", loc)));
  }

  // The core's TPipe. Kept per core, since several kernels may be suspended at SyncAll.
  static TPipe*& current() { return reinterpret_cast<TPipe*&>(detail::core().pipe_object); }

 private:
  std::unique_ptr<::acpu::PipeState> state_;
};

inline TPipe* GetTPipePtr(const Loc& loc = Loc::current()) {
  if (!TPipe::current()) {
    detail::core().report(::acpu::Kind::kQueue, detail::core().site("GetTPipePtr", loc), "there is no TPipe");
    detail::core().stop();
  }
  return TPipe::current();
}

}  // namespace AscendC
