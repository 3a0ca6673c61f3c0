// One AI-vector core of the twin: its unified buffer, pipes, clocks, flags and events.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "acpu.h"
#include "cost.h"
#include "global_memory.h"
#include "shadow.h"

namespace acpu {

inline constexpr int kEventIds = 8;  // per kind of event on Atlas A2/A3

class PipeState;

// Thrown to unwind a kernel that can't go on; never leaves the twin.
struct KernelStop {};

// The bounds of a LocalTensor: a byte range of the unified buffer, and the allocation it belongs to.
struct UbExtent {
  uint32_t begin = 0;
  uint32_t end = 0;
  uint32_t allocation = 0;  // 0: none
  uint32_t generation = 0;
};

// `rows` ranges of `bytes` bytes, `stride` bytes apart, of the unified buffer or of global memory.
struct Access {
  const char* operand;
  bool write;
  uint64_t address;  // offset in the unified buffer, or host address
  uint64_t bytes;
  uint32_t rows = 1;
  uint64_t stride = 0;
  bool global = false;
  UbExtent extent{};    // unified buffer only
  bool picked = false;  // which bytes are read depends on data: ordering only, see Core::picked_inside
};

// State shared by the cores of a launch.
struct Machine {
  explicit Machine(const Options& launch_options);

  // True if the effect of this synchronisation site is to be dropped; counts the call.
  bool sync_site(SiteId site);

  Options options;
  SiteTable sites;
  ReportLog log;
  GlobalMemory memory;
  std::map<SiteId, uint64_t> sync_hits;
};

class Core {
 public:
  Core(Machine& machine, int index);

  int index() const { return index_; }
  int count() const { return machine_.options.cores; }
  Machine& machine() { return machine_; }
  uint8_t* ub() { return ub_.data(); }
  uint32_t ub_bytes() const { return static_cast<uint32_t>(ub_.size()); }

  // Findings about the call at `site`.
  SiteId site(const char* api, const Loc& loc) { return machine_.sites.intern(api, loc); }
  void report(Kind kind, SiteId site, const std::string& what, SiteId other = kNoSite);
  [[noreturn]] void stop();

  // Checks the accesses of an instruction and runs its effect when the schedule says so. An instruction whose accesses
  // are out of bounds has no effect.
  void issue(Pipe pipe, SiteId site, std::span<const Access> accesses, std::function<void()> effect);
  void issue(Pipe pipe, SiteId site, std::initializer_list<Access> accesses, std::function<void()> effect) {
    issue(pipe, site, std::span<const Access>(accesses.begin(), accesses.size()), std::move(effect));
  }
  // Makes the instructions issued to `pipe` so far take effect (for results that the scalar unit reads from registers).
  void settle(Pipe pipe);

  // The bytes of a written range turn out to hold nothing a kernel may read.
  void forget(const Access& access);
  // Whether element [at, at+bytes) of a picked source exists; reports. Called when the instruction takes effect.
  bool picked_inside(SiteId site, const Access& source, uint64_t at, uint64_t bytes);
  // Whether the accesses stay inside the unified buffer; reports nothing.
  bool reachable(std::span<const Access> accesses) const;
  // Reports a call that needs `bytes` of the unified buffer left free for CANN's own use.
  void need_spare(uint32_t bytes, SiteId site);

  // Scalar unit.
  void ub_read(SiteId site, const UbExtent& extent, uint32_t address, uint32_t bytes, void* to);
  void ub_write(SiteId site, const UbExtent& extent, uint32_t address, uint32_t bytes, const void* from);
  void gm_read(SiteId site, const void* from, uint64_t bytes, void* to);
  void gm_write(SiteId site, void* to, uint64_t bytes, const void* from);
  void clean_cache(SiteId site, const void* data, bool whole);

  // Synchronisation.
  void set_flag(Pipe from, Pipe to, int id, SiteId site);
  void wait_flag(Pipe from, Pipe to, int id, SiteId site);
  void barrier(Pipe pipe, SiteId site);
  void barrier_all(SiteId site);
  void sync_all(SiteId site);

  // Event ids.
  int alloc_event(Pipe from, Pipe to, SiteId site);
  int fetch_event(Pipe from, Pipe to, SiteId site);
  void release_event(Pipe from, Pipe to, int id, SiteId site);
  void reset_events();  // all ids are free again; flags stay as they are

  // Unified buffer.
  UbExtent allocate(uint32_t bytes, SiteId site);
  void reset_allocations();
  // A new generation; the bytes are poisoned once `last_user` is through with them.
  void retire(UbExtent& extent, Pipe last_user);

  // Runs all pending instructions, then reports leftovers of the kernel.
  void finish();

  // Set by the launcher: gives the processor to the next core until all stand at SyncAll.
  std::function<void()> yield;
  bool cancelled = false;  // stop at the next synchronisation: another core can't arrive
  SiteId waiting_at = kNoSite;
  PipeState* pipe = nullptr;   // of the TPipe in use
  bool internal = false;        // synchronising on the framework's own account: no site of the kernel
  void* pipe_object = nullptr;  // the TPipe itself, for GetTPipePtr
  uint32_t epoch = 0;
  PipeTimes times;

 private:
  struct Flag {
    bool set = false;
    bool dropped = false;
    Clock clock;
    SiteId site = kNoSite;
    uint64_t time = 0;
    uint64_t position = 0;  // of the SetFlag in its pipe's queue
  };
  struct EventState {
    Flag flag;
    bool allocated = false;
    bool handed_out = false;  // by AllocEventID or FetchEventID
    SiteId allocated_at = kNoSite;
  };
  struct Pending {
    enum class What : uint8_t { kRun, kSet, kWait, kFence } what;
    std::function<void()> run;
    Pipe wait_pipe = Pipe::kS;
    uint64_t wait_position = 0;
  };
  struct Queue {
    std::deque<Pending> pending;
    uint64_t executed = 0;
    uint64_t pushed() const { return executed + pending.size(); }
  };
  struct Allocation {
    uint32_t generation = 1;
  };

  Toucher toucher(Pipe pipe, SiteId site);
  bool dropped(SiteId site) { return !internal && machine_.sync_site(site); }
  bool check_access(Pipe pipe, const Toucher& by, const Access& access);
  bool check_extent(const Toucher& by, const Access& access);
  void touch_ub(const Toucher& by, const Access& access, uint64_t address, uint64_t bytes);
  EventState* event(Pipe from, Pipe to, int id, SiteId site);
  void take_time(Pipe pipe, SiteId site, std::span<const Access> accesses);
  uint64_t push(Pipe pipe, Pending pending);
  void drain(Pipe pipe, uint64_t position);
  void drain_all();

  Machine& machine_;
  int index_;
  std::vector<uint8_t> ub_;
  std::vector<History> blocks_;
  std::vector<uint32_t> initialised_;  // bit per byte of a block
  std::vector<Allocation> allocations_;
  uint32_t ub_used_ = 0;
  std::array<uint32_t, kPipes> issued_{};
  std::array<Clock, kPipes> known_{};
  std::array<Queue, kPipes> queues_;
  std::array<std::array<std::array<EventState, kEventIds>, kPipes>, kPipes> events_;
};

// The core whose kernel is running; throws std::logic_error outside a launch.
Core& current_core();
void set_current_core(Core* core);

}  // namespace acpu
