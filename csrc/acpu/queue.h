// The state behind a TQue and a TPipe: buffers, their events, and the order of EnQue and DeQue.
#pragma once

#include <deque>
#include <vector>

#include "core.h"

namespace acpu {

// The pipe that fills a queue's buffers and the one that uses them; whether the queue orders the two.
struct QueuePipes {
  Pipe producer;
  Pipe consumer;
  bool ordered = true;
};

class QueueState {
 public:
  QueueState(Core& core, QueuePipes pipes, uint32_t depth) : core_(core), pipes_(pipes), depth_(depth) {}

  void add_buffer(const UbExtent& extent) { buffers_.push_back({extent}); }
  UbExtent alloc(SiteId site);
  void free(const UbExtent& extent, SiteId site);
  void enqueue(const UbExtent& extent, SiteId site);
  UbExtent dequeue(SiteId site);
  // Waits for the events of freed buffers, and reports buffers that are not free.
  void destroy(SiteId site);

  uint32_t queued() const { return static_cast<uint32_t>(fifo_.size()); }
  bool has_idle() const;

 private:
  enum class State : uint8_t { kFree, kAllocated, kQueued, kDequeued };
  struct Buffer {
    UbExtent extent;
    State state = State::kFree;
    int event = -1;
    SiteId since = kNoSite;
  };

  Buffer* find(const UbExtent& extent, const char* call, SiteId site);

  Core& core_;
  QueuePipes pipes_;
  uint32_t depth_;
  std::vector<Buffer> buffers_;
  std::deque<size_t> fifo_;
  size_t next_ = 0;
};

// The resources of a TPipe.
class PipeState {
 public:
  PipeState(Core& core, SiteId site);
  ~PipeState();
  PipeState(const PipeState&) = delete;
  PipeState& operator=(const PipeState&) = delete;

  QueueState* init_queue(QueuePipes pipes, uint32_t depth, uint32_t buffers, uint32_t bytes, SiteId site);
  UbExtent init_buffer(uint32_t bytes, SiteId site);
  // Ends every queue and forgets buffers and event ids, so that the unified buffer can be handed out anew. Waits for the
  // queues' freed buffers only: other instructions may still be at work on the buffer handed out next.
  void reset(SiteId site);
  // Ends every queue and waits for all pipes.
  void destroy();

 private:
  void end_queues(SiteId site);

  Core& core_;
  SiteId site_;
  std::deque<QueueState> queues_;
  uint32_t buffers_ = 0;
  bool alive_ = true;
};

}  // namespace acpu
