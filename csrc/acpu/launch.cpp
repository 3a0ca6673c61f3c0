// Runs the cores of a launch one after the other, each on a stack of its own, with SyncAll as the switching point.
#include <ucontext.h>

#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>

#include "core.h"

#if defined(__SANITIZE_ADDRESS__)
#define ACPU_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ACPU_ASAN 1
#endif
#endif
#ifdef ACPU_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

namespace acpu {

namespace {

// AddressSanitizer must know which stack is in use.
void before_switch([[maybe_unused]] void** save, [[maybe_unused]] const void* stack, [[maybe_unused]] size_t bytes) {
#ifdef ACPU_ASAN
  __sanitizer_start_switch_fiber(save, stack, bytes);
#endif
}

void after_switch([[maybe_unused]] void* saved, [[maybe_unused]] const void** stack, [[maybe_unused]] size_t* bytes) {
#ifdef ACPU_ASAN
  __sanitizer_finish_switch_fiber(saved, stack, bytes);
#endif
}

class Fiber {
 public:
  Fiber(Machine& machine, int index, const std::function<void()>& kernel, size_t stack_bytes)
      : core(machine, index), kernel_(kernel), stack_bytes_(stack_bytes), stack_(new char[stack_bytes]) {
    core.yield = [this] { leave(false); };
  }

  // Runs the kernel until it stands at SyncAll or ends.
  void resume() {
    if (!started_) {
      started_ = true;
      getcontext(&own_);
      own_.uc_stack.ss_sp = stack_.get();
      own_.uc_stack.ss_size = stack_bytes_;
      own_.uc_link = nullptr;
      const auto self = reinterpret_cast<uintptr_t>(this);
      makecontext(&own_, reinterpret_cast<void (*)()>(&Fiber::entry), 2, static_cast<unsigned>(self >> 32),
                  static_cast<unsigned>(self));
    }
    set_current_core(&core);
    void* saved = nullptr;
    before_switch(&saved, stack_.get(), stack_bytes_);
    swapcontext(&caller_, &own_);
    after_switch(saved, nullptr, nullptr);
    set_current_core(nullptr);
  }

  Core core;
  bool done = false;
  bool stopped = false;

 private:
  static void entry(unsigned high, unsigned low) {
    auto* fiber = reinterpret_cast<Fiber*>((static_cast<uintptr_t>(high) << 32) | low);
    after_switch(nullptr, &fiber->caller_stack_, &fiber->caller_stack_bytes_);
    fiber->run();
    fiber->done = true;
    fiber->leave(true);
  }

  void run() {
    try {
      kernel_();
      if (!core.cancelled) {
        core.finish();
        return;
      }
    } catch (const KernelStop&) {
    } catch (const std::exception& error) {
      core.report(Kind::kException, kNoSite, error.what());
    }
    stopped = true;
  }

  void leave(bool for_good) {
    void* saved = nullptr;
    before_switch(for_good ? nullptr : &saved, caller_stack_, caller_stack_bytes_);
    swapcontext(&own_, &caller_);
    after_switch(saved, &caller_stack_, &caller_stack_bytes_);
  }

  const std::function<void()>& kernel_;
  size_t stack_bytes_;
  std::unique_ptr<char[]> stack_;
  ucontext_t own_{};
  ucontext_t caller_{};
  const void* caller_stack_ = nullptr;
  size_t caller_stack_bytes_ = 0;
  bool started_ = false;
};

// The cores that wait at SyncAll for one that ended: they would wait for ever.
void cancel_waiting(Machine& machine, std::vector<std::unique_ptr<Fiber>>& fibers) {
  bool stopped = false;
  for (auto& fiber : fibers) stopped |= fiber->stopped;
  for (auto& fiber : fibers) {
    if (fiber->done) continue;
    // After a stop that was reported already the wait is only its consequence.
    if (!stopped) {
      machine.log.add(Kind::kDeadlock, fiber->core.index(), fiber->core.waiting_at, kNoSite,
                      "waits for cores that ended without reaching it");
    }
    fiber->core.cancelled = true;
    fiber->resume();
  }
}

// Ends a phase: all cores go on when the slowest is there.
void add_phase(const std::vector<std::unique_ptr<Fiber>>& fibers, uint64_t& begin, Cost& cost) {
  uint64_t end = begin;
  for (const auto& fiber : fibers) end = std::max(end, fiber->core.times.end());
  cost.phases.push_back(end - begin);
  begin = end + kCosts.sync_all;
  for (const auto& fiber : fibers) fiber->core.times.all_at(begin);
}

void run_cores(Machine& machine, std::vector<std::unique_ptr<Fiber>>& fibers, Cost& cost) {
  uint64_t begin = 0;
  const bool reverse = machine.options.schedule == Schedule::kLazy;
  for (;;) {
    size_t done = 0;
    for (size_t i = 0; i < fibers.size(); ++i) {
      Fiber& fiber = *fibers[reverse ? fibers.size() - 1 - i : i];
      fiber.resume();
      done += fiber.done;
    }
    add_phase(fibers, begin, cost);
    if (done == fibers.size()) return;
    if (done > 0) return cancel_waiting(machine, fibers);
    for (auto& fiber : fibers) ++fiber->core.epoch;
  }
}

void check_options(const Options& options) {
  if (options.cores < 1 || options.cores > 64) throw std::invalid_argument("cores must be in 1..64");
  if (options.ub_bytes == 0 || options.ub_bytes % kBlockBytes) {
    throw std::invalid_argument("ub_bytes must be a positive multiple of 32");
  }
}

// A line belongs to one region, and its neighbours on a line don't depend on where the host's allocator put a buffer.
void check_region(const void* data, size_t bytes, const std::string& name) {
  if (reinterpret_cast<uintptr_t>(data) % kLineBytes) {
    throw std::invalid_argument("region " + name + " must start on 64 bytes, as the device's buffers do");
  }
  if (bytes == 0) throw std::invalid_argument("region " + name + " is empty");
}

}  // namespace

Launch& Launch::region(const void* data, size_t bytes, RegionUse use, std::string name) {
  check_region(data, bytes, name);
  auto* start = static_cast<uint8_t*>(const_cast<void*>(data));
  for (const RegionSpec& other : regions_) {
    if (start < other.data + other.bytes && other.data < start + bytes) {
      throw std::invalid_argument("region " + name + " overlaps region " + other.name);
    }
  }
  regions_.push_back({start, bytes, use, std::move(name)});
  return *this;
}

Result Launch::run(const std::function<void()>& kernel) {
  check_options(options_);
  Machine machine(options_);
  for (const RegionSpec& region : regions_) machine.memory.add(region.data, region.bytes, region.use, region.name);
  std::vector<std::unique_ptr<Fiber>> fibers;
  for (int i = 0; i < options_.cores; ++i) {
    fibers.push_back(std::make_unique<Fiber>(machine, i, kernel, options_.fiber_stack_bytes));
  }
  Result result;
  run_cores(machine, fibers, result.cost);
  for (auto& fiber : fibers) {
    result.completed &= !fiber->stopped;
    result.cost.work.add(fiber->core.times.work);
  }
  result.reports = machine.log.take();
  for (const auto& [site, hits] : machine.sync_hits) result.sync_sites.push_back({machine.sites.at(site), hits});
  std::sort(result.sync_sites.begin(), result.sync_sites.end(), [](const SyncSite& a, const SyncSite& b) {
    return std::tie(a.site.file, a.site.line, a.site.column) < std::tie(b.site.file, b.site.line, b.site.column);
  });
  return result;
}

}  // namespace acpu
