#include "queue.h"

namespace acpu {

namespace {

constexpr uint32_t kMaxBuffers = 64;  // of one TPipe

}  // namespace

bool QueueState::has_idle() const {
  for (const Buffer& buffer : buffers_) {
    if (buffer.state == State::kFree) return true;
  }
  return false;
}

UbExtent QueueState::alloc(SiteId site) {
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const size_t at = (next_ + i) % buffers_.size();
    Buffer& buffer = buffers_[at];
    if (buffer.state != State::kFree) continue;
    next_ = (at + 1) % buffers_.size();
    if (buffer.event >= 0) {
      core_.wait_flag(pipes_.consumer, pipes_.producer, buffer.event, site);
      core_.release_event(pipes_.consumer, pipes_.producer, buffer.event, site);
      buffer.event = -1;
    }
    buffer.state = State::kAllocated;
    buffer.since = site;
    return buffer.extent;
  }
  core_.report(Kind::kQueue, site, "no free buffer: FreeTensor is missing",
               buffers_.empty() ? kNoSite : buffers_[next_].since);
  core_.stop();
}

QueueState::Buffer* QueueState::find(const UbExtent& extent, const char* call, SiteId site) {
  for (Buffer& buffer : buffers_) {
    if (buffer.extent.allocation != extent.allocation) continue;
    if (buffer.extent.generation == extent.generation) return &buffer;
    core_.report(Kind::kUseAfterFree, site, std::string(call) + " of a tensor that was freed", buffer.since);
    return nullptr;
  }
  core_.report(Kind::kQueue, site, std::string(call) + " of a tensor that is not from this queue");
  return nullptr;
}

void QueueState::free(const UbExtent& extent, SiteId site) {
  Buffer* buffer = find(extent, "FreeTensor", site);
  if (!buffer) return;
  if (buffer->state == State::kFree || buffer->state == State::kQueued) {
    core_.report(Kind::kQueue, site,
                 buffer->state == State::kFree ? "frees a free tensor" : "frees a tensor that is still queued",
                 buffer->since);
    return;
  }
  core_.retire(buffer->extent, pipes_.consumer);
  buffer->state = State::kFree;
  buffer->since = site;
  if (!pipes_.ordered) return;
  buffer->event = core_.alloc_event(pipes_.consumer, pipes_.producer, site);
  core_.set_flag(pipes_.consumer, pipes_.producer, buffer->event, site);
}

void QueueState::enqueue(const UbExtent& extent, SiteId site) {
  Buffer* buffer = find(extent, "EnQue", site);
  if (!buffer) return;
  if (buffer->state != State::kAllocated && buffer->state != State::kDequeued) {
    core_.report(Kind::kQueue, site, "enqueues a tensor that is not allocated", buffer->since);
    return;
  }
  if (fifo_.size() >= depth_) {
    core_.report(Kind::kQueue, site,
                 "more EnQue without DeQue than the depth " + std::to_string(depth_) + " of the queue", buffer->since);
  }
  buffer->state = State::kQueued;
  buffer->since = site;
  fifo_.push_back(static_cast<size_t>(buffer - buffers_.data()));
  if (!pipes_.ordered) return;
  buffer->event = core_.alloc_event(pipes_.producer, pipes_.consumer, site);
  core_.set_flag(pipes_.producer, pipes_.consumer, buffer->event, site);
}

UbExtent QueueState::dequeue(SiteId site) {
  if (fifo_.empty()) {
    core_.report(Kind::kQueue, site, "DeQue of an empty queue");
    core_.stop();
  }
  Buffer& buffer = buffers_[fifo_.front()];
  fifo_.pop_front();
  if (buffer.event >= 0) {
    core_.wait_flag(pipes_.producer, pipes_.consumer, buffer.event, site);
    core_.release_event(pipes_.producer, pipes_.consumer, buffer.event, site);
    buffer.event = -1;
  }
  buffer.state = State::kDequeued;
  buffer.since = site;
  return buffer.extent;
}

void QueueState::destroy(SiteId site) {
  for (Buffer& buffer : buffers_) {
    if (buffer.state == State::kQueued) {
      core_.report(Kind::kQueue, buffer.since, "its tensor is never dequeued");
      if (buffer.event >= 0) {
        core_.wait_flag(pipes_.producer, pipes_.consumer, buffer.event, site);
        core_.release_event(pipes_.producer, pipes_.consumer, buffer.event, site);
      }
    } else if (buffer.state != State::kFree) {
      core_.report(Kind::kQueue, buffer.since, "its tensor is never freed");
    } else if (buffer.event >= 0) {
      core_.wait_flag(pipes_.consumer, pipes_.producer, buffer.event, site);
      core_.release_event(pipes_.consumer, pipes_.producer, buffer.event, site);
    }
    buffer.event = -1;
  }
  buffers_.clear();
  fifo_.clear();
}

PipeState::PipeState(Core& core, SiteId site) : core_(core), site_(site) {
  if (core_.pipe) core_.report(Kind::kQueue, site, "a second TPipe while the first is in use: Destroy it before");
  core_.pipe = this;
}

PipeState::~PipeState() { destroy(); }

QueueState* PipeState::init_queue(QueuePipes pipes, uint32_t depth, uint32_t buffers, uint32_t bytes, SiteId site) {
  if (buffers == 0 || bytes == 0) core_.report(Kind::kLimit, site, "InitBuffer with no buffers or no bytes");
  queues_.emplace_back(core_, pipes, depth);
  for (uint32_t i = 0; i < buffers; ++i) queues_.back().add_buffer(init_buffer(bytes, site));
  return &queues_.back();
}

UbExtent PipeState::init_buffer(uint32_t bytes, SiteId site) {
  if (++buffers_ > kMaxBuffers) core_.report(Kind::kLimit, site, "more than 64 buffers in one TPipe");
  return core_.allocate((bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes, site);
}

void PipeState::end_queues(SiteId site) {
  core_.internal = true;
  for (QueueState& queue : queues_) queue.destroy(site);
  core_.internal = false;
}

void PipeState::reset(SiteId site) {
  end_queues(site);
  core_.reset_events();
  core_.reset_allocations();
  buffers_ = 0;
}

void PipeState::destroy() {
  if (!alive_) return;
  alive_ = false;
  if (core_.pipe == this) core_.pipe = nullptr;
  if (core_.cancelled) return;
  try {
    end_queues(site_);
    core_.barrier_all(kNoSite);
    core_.reset_allocations();
  } catch (const KernelStop&) {
    // Reported; the launcher sees that the core is cancelled. A destructor must not throw.
  }
}

}  // namespace acpu
