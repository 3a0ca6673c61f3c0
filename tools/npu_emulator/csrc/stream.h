// Streams, events and captured graphs of the emulated devices.
//
// A stream is a thread that works off its tasks in order. With NPU_EMULATOR_DELAY_US=N every task first sleeps a
// random time of up to N microseconds (NPU_EMULATOR_SEED chooses the sequence), so that a missing wait shows.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace npu {

using Task = std::function<void()>;

// Shared by an event and the tasks that record it or wait for it.
class EventState {
 public:
  uint64_t next_record();             // on the host, when a record is queued
  uint64_t last_record() const;       // 0: never recorded
  void complete(uint64_t record);     // on the stream
  bool completed(uint64_t record) const;
  void wait(uint64_t record) const;   // until that record is complete
  void reset();                       // external events: a record is consumed by a reset
  double milliseconds() const;        // of the last completed record

 private:
  mutable std::mutex lock_;
  mutable std::condition_variable changed_;
  uint64_t asked_ = 0, done_ = 0;
  double at_ = 0;
};

// Tasks recorded while streams were captured, in the order of their submission.
struct Graph {
  std::vector<Task> tasks;
  std::vector<std::pair<size_t, size_t>> groups;  // of tasks that may be replaced: [first, last)
  std::mutex lock;
  void *model = nullptr;  // the handle by which programs know it
};

struct Event {
  std::shared_ptr<EventState> state = std::make_shared<EventState>();
  std::shared_ptr<Graph> graph;  // recorded while that graph was captured: whoever waits for it is captured, too
  bool external = false;         // is recorded outside of the graph that waits for it, or the other way round
};

struct TaskGroup {
  std::shared_ptr<Graph> graph;
  size_t first = 0, last = 0;
  std::vector<Task> update;
};

class Stream {
 public:
  explicit Stream(int device);
  ~Stream();
  Stream(const Stream &) = delete;
  Stream &operator=(const Stream &) = delete;

  // Queues a task, or records it in the graph that captures this stream.
  void submit(Task task);
  void synchronize();
  bool idle();
  // The first error of a task since the last call; empty if there was none.
  std::string take_error();

  const int device;
  const int32_t id;
  std::shared_ptr<Graph> capturing;     // set on the host only
  std::shared_ptr<TaskGroup> updating;  // tasks go into a group's update instead
  size_t group_start = 0;

 private:
  void work();

  std::mutex lock_;
  std::condition_variable wake_, drained_;
  std::deque<Task> tasks_;
  bool busy_ = false, stopping_ = false;
  std::string error_;
  std::minstd_rand random_;
  std::thread thread_;
};

void record(Event &event, Stream &stream);
void wait_for(Event &event, Stream &stream);
// Streams that a graph captures are as before the capture.
void end_capture(const std::shared_ptr<Graph> &graph);
// Every stream of a device; -1: of all.
std::string synchronize_device(int device);
// The number of microseconds by which tasks may be delayed.
long longest_delay();

}  // namespace npu
