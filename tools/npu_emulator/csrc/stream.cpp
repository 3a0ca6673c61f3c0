#include "stream.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>

namespace npu {
namespace {

std::mutex registry_lock;
std::vector<Stream *> registry;
std::atomic<int32_t> last_id{0};

long number(const char *name) {
  const char *text = std::getenv(name);
  return text != nullptr ? std::strtol(text, nullptr, 10) : 0;
}

double now_ms() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace

long longest_delay() {
  static const long delay = number("NPU_EMULATOR_DELAY_US");
  return delay;
}

uint64_t EventState::next_record() {
  std::lock_guard<std::mutex> hold(lock_);
  return ++asked_;
}

uint64_t EventState::last_record() const {
  std::lock_guard<std::mutex> hold(lock_);
  return asked_;
}

void EventState::complete(uint64_t record) {
  std::lock_guard<std::mutex> hold(lock_);
  done_ = std::max(done_, record);
  at_ = now_ms();
  changed_.notify_all();
}

bool EventState::completed(uint64_t record) const {
  std::lock_guard<std::mutex> hold(lock_);
  return done_ >= record;
}

void EventState::wait(uint64_t record) const {
  std::unique_lock<std::mutex> hold(lock_);
  changed_.wait(hold, [&] { return done_ >= record; });
}

void EventState::reset() {
  std::lock_guard<std::mutex> hold(lock_);
  asked_ = done_ = 0;
}

double EventState::milliseconds() const {
  std::lock_guard<std::mutex> hold(lock_);
  return at_;
}

Stream::Stream(int on_device)
    : device(on_device),
      id(++last_id),
      random_(static_cast<unsigned>(number("NPU_EMULATOR_SEED")) * 7919U + static_cast<unsigned>(id)),
      thread_([this] { work(); }) {
  std::lock_guard<std::mutex> hold(registry_lock);
  registry.push_back(this);
}

Stream::~Stream() {
  {
    std::lock_guard<std::mutex> hold(registry_lock);
    registry.erase(std::remove(registry.begin(), registry.end(), this), registry.end());
  }
  {
    std::lock_guard<std::mutex> hold(lock_);
    stopping_ = true;
    wake_.notify_all();
  }
  thread_.join();
}

void Stream::submit(Task task) {
  if (updating != nullptr) {
    updating->update.push_back(std::move(task));
    return;
  }
  if (capturing != nullptr) {
    std::lock_guard<std::mutex> hold(capturing->lock);
    capturing->tasks.push_back(std::move(task));
    return;
  }
  std::lock_guard<std::mutex> hold(lock_);
  tasks_.push_back(std::move(task));
  wake_.notify_all();
}

void Stream::synchronize() {
  std::unique_lock<std::mutex> hold(lock_);
  drained_.wait(hold, [this] { return tasks_.empty() && !busy_; });
}

bool Stream::idle() {
  std::lock_guard<std::mutex> hold(lock_);
  return tasks_.empty() && !busy_;
}

std::string Stream::take_error() {
  std::lock_guard<std::mutex> hold(lock_);
  std::string found;
  found.swap(error_);
  return found;
}

void Stream::work() {
  std::unique_lock<std::mutex> hold(lock_);
  for (;;) {
    wake_.wait(hold, [this] { return stopping_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    busy_ = true;
    long delay = longest_delay() > 0 ? static_cast<long>(random_() % static_cast<unsigned>(longest_delay() + 1)) : 0;
    hold.unlock();
    if (delay > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay));
    std::string failure;
    try {
      task();
    } catch (const std::exception &error) {
      failure = error.what();
      std::fprintf(stderr, "npu_emulator: a task of stream %d failed: %s\n", id, error.what());
    }
    task = nullptr;
    hold.lock();
    if (!failure.empty() && error_.empty()) error_ = failure;
    busy_ = false;
    if (tasks_.empty()) drained_.notify_all();
  }
}

// A graph is replayed in the order of submission, which respects its own events: only external ones are tasks.
void record(Event &event, Stream &stream) {
  std::shared_ptr<EventState> state = event.state;
  event.graph = event.external ? nullptr : stream.capturing;
  if (event.graph != nullptr) return;
  if (stream.capturing != nullptr) {  // numbered anew by every replay
    stream.submit([state] { state->complete(state->next_record()); });
    return;
  }
  uint64_t record = state->next_record();
  stream.submit([state, record] { state->complete(record); });
}

void wait_for(Event &event, Stream &stream) {
  std::shared_ptr<EventState> state = event.state;
  if (event.graph != nullptr) {
    if (stream.capturing == nullptr) stream.capturing = event.graph;
  } else if (event.external) {
    stream.submit([state] { state->wait(1); });
  } else if (uint64_t record = state->last_record()) {
    stream.submit([state, record] { state->wait(record); });
  }
}

void end_capture(const std::shared_ptr<Graph> &graph) {
  std::lock_guard<std::mutex> hold(registry_lock);
  for (Stream *stream : registry)
    if (stream->capturing == graph) stream->capturing = nullptr;
}

std::string synchronize_device(int device) {
  std::vector<Stream *> streams;
  {
    std::lock_guard<std::mutex> hold(registry_lock);
    for (Stream *stream : registry)
      if (device < 0 || stream->device == device) streams.push_back(stream);
  }
  std::string first;
  for (Stream *stream : streams) {
    stream->synchronize();
    std::string error = stream->take_error();
    if (first.empty()) first = error;
  }
  return first;
}

}  // namespace npu
