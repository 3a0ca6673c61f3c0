#include "core.h"

#include <cstring>
#include <stdexcept>

namespace acpu {

namespace {

thread_local Core* g_core = nullptr;

std::string range_text(uint64_t begin, uint64_t end) {
  std::string text = "[";
  text.append(std::to_string(begin)).append(", ").append(std::to_string(end)).append(")");
  return text;
}

const char* hazard(bool earlier_write, bool write) {
  if (earlier_write) return write ? "write after write" : "read after write";
  return "write after read";
}

}  // namespace

Core& current_core() {
  if (!g_core) throw std::logic_error("an AscendC call outside acpu::Launch::run");
  return *g_core;
}

void set_current_core(Core* core) { g_core = core; }

Machine::Machine(const Options& launch_options)
    : options(launch_options),
      log(sites),
      memory(log, options.cores, options.schedule == Schedule::kEager) {}

bool Machine::sync_site(SiteId site) {
  ++sync_hits[site];
  return !options.drop.empty() && options.drop.contains(sites.at(site).key());
}

Core::Core(Machine& machine, int index)
    : machine_(machine),
      index_(index),
      ub_(machine.options.ub_bytes, kPoison),
      blocks_(machine.options.ub_bytes / kBlockBytes),
      initialised_(machine.options.ub_bytes / kBlockBytes),
      allocations_(1) {}

void Core::report(Kind kind, SiteId site, const std::string& what, SiteId other) {
  machine_.log.add(kind, index_, site, other, what);
}

void Core::stop() {
  cancelled = true;
  throw KernelStop{};
}

Toucher Core::toucher(Pipe pipe, SiteId site) {
  const uint32_t number = ++issued_[index_of(pipe)];
  if (pipe == Pipe::kS) known_[index_of(pipe)].done[index_of(pipe)] = number;  // the scalar unit runs in order
  return {index_, pipe, number, epoch, site};
}

// Memory ------------------------------------------------------------------------------------------------------------

bool Core::check_extent(const Toucher& by, const Access& access) {
  const UbExtent& extent = access.extent;
  if (extent.allocation == 0) {
    report(Kind::kUseAfterFree, by.site, std::string(access.operand) + " is a tensor without memory");
    return false;
  }
  if (allocations_[extent.allocation].generation != extent.generation) {
    report(Kind::kUseAfterFree, by.site, std::string(access.operand) + " was freed");
    return false;
  }
  const uint64_t end = access.address + (access.rows - 1) * access.stride + access.bytes;
  if (access.address < extent.begin || end > extent.end) {
    report(Kind::kUbOutOfBounds, by.site,
           std::string(access.operand) + (access.write ? " writes" : " reads") + " bytes " +
               range_text(access.address - extent.begin, end - extent.begin) + " of a tensor of " +
               std::to_string(extent.end - extent.begin) + " bytes");
    return false;
  }
  return true;
}

void Core::touch_ub(const Toucher& by, const Access& access, uint64_t address, uint64_t bytes) {
  const Clock& clock = known_[index_of(by.pipe)];
  for (uint64_t done = 0; done < bytes;) {
    const uint64_t block = (address + done) / kBlockBytes;
    const uint32_t offset = (address + done) % kBlockBytes;
    const auto part = static_cast<uint32_t>(std::min<uint64_t>(kBlockBytes - offset, bytes - done));
    const auto mask = static_cast<uint32_t>(bit_range(offset, part));
    if (access.write) {
      initialised_[block] |= mask;
    } else if (!access.picked && (mask & ~initialised_[block])) {
      report(Kind::kUninitialisedRead, by.site,
             std::string(access.operand) + " reads " + std::to_string(std::popcount(mask & ~initialised_[block])) +
                 " bytes that nothing wrote, unified buffer block " + std::to_string(block) + ", byte " +
                 std::to_string(std::countr_zero(mask & ~initialised_[block])));
    }
    blocks_[block].touch(
        by, mask, access.write, clock,
        [&](const Record& record) {
          report(Kind::kRace, by.site,
                 std::string(access.operand) + ", " + hazard(record.write, access.write) + ", " +
                     pipe_name(by.pipe) + " not ordered after " + pipe_name(record.pipe) +
                     ", unified buffer block " + std::to_string(block),
                 record.site);
        },
        [](const Record&, uint64_t) {});
    done += part;
  }
}

bool Core::check_access(Pipe pipe, const Toucher& by, const Access& access) {
  if (access.bytes == 0 || access.rows == 0) return true;
  if (!access.global) {
    if (!check_extent(by, access)) return false;
    Toucher local = by;
    local.epoch = 0;  // the unified buffer is the core's own: SyncAll adds no ordering beyond its barrier
    for (uint32_t row = 0; row < access.rows; ++row) {
      touch_ub(local, access, access.address + row * access.stride, access.bytes);
    }
    return true;
  }
  bool inside = true;
  for (uint32_t row = 0; row < access.rows; ++row) {
    const auto* data = reinterpret_cast<const void*>(access.address + row * access.stride);
    inside &= machine_.memory.copy_access(by, known_[index_of(pipe)], data, access.bytes, access.write);
  }
  return inside;
}

void Core::forget(const Access& access) {
  if (access.global || access.bytes == 0 || !reachable({&access, 1})) return;
  for (uint32_t row = 0; row < access.rows; ++row) {
    for (uint64_t at = access.address + row * access.stride, end = at + access.bytes; at < end; ++at) {
      initialised_[at / kBlockBytes] &= ~(uint32_t{1} << at % kBlockBytes);
    }
  }
}

bool Core::picked_inside(SiteId site, const Access& source, uint64_t at, uint64_t bytes) {
  if (at + bytes > source.bytes) {
    report(Kind::kUbOutOfBounds, site,
           "picks bytes " + range_text(at, at + bytes) + " of a tensor of " + std::to_string(source.bytes) + " bytes");
    return false;
  }
  // Only under the eager schedule is this the moment of the call, with the buffer's state of that moment.
  if (machine_.options.schedule != Schedule::kEager) return true;
  for (uint64_t byte = source.address + at; byte < source.address + at + bytes; ++byte) {
    if (initialised_[byte / kBlockBytes] >> byte % kBlockBytes & 1) continue;
    report(Kind::kUninitialisedRead, site, "picks a byte that nothing wrote");
    break;
  }
  return true;
}

bool Core::reachable(std::span<const Access> accesses) const {
  for (const Access& access : accesses) {
    if (access.rows == 0 || access.bytes == 0) continue;
    if (access.address + (access.rows - 1) * access.stride + access.bytes > ub_.size()) return false;
  }
  return true;
}

void Core::need_spare(uint32_t bytes, SiteId site) {
  if (ub_bytes() - ub_used_ >= bytes) return;
  report(Kind::kUbCapacity, site,
         "needs " + std::to_string(bytes) + " bytes of the unified buffer left free, " +
             std::to_string(ub_bytes() - ub_used_) + " are");
}

void Core::ub_read(SiteId site, const UbExtent& extent, uint32_t address, uint32_t bytes, void* to) {
  const Toucher by = toucher(Pipe::kS, site);
  times.scalar(false);
  if (!check_access(Pipe::kS, by, {"tensor", false, address, bytes, 1, 0, false, extent})) {
    std::memset(to, kPoison, bytes);
    return;
  }
  std::memcpy(to, ub() + address, bytes);
}

void Core::ub_write(SiteId site, const UbExtent& extent, uint32_t address, uint32_t bytes, const void* from) {
  const Toucher by = toucher(Pipe::kS, site);
  times.scalar(true);
  if (check_access(Pipe::kS, by, {"tensor", true, address, bytes, 1, 0, false, extent})) {
    std::memcpy(ub() + address, from, bytes);
  }
}

void Core::gm_read(SiteId site, const void* from, uint64_t bytes, void* to) {
  times.global_scalar();
  machine_.memory.scalar_read(toucher(Pipe::kS, site), known_[index_of(Pipe::kS)], from, bytes, to);
}

void Core::gm_write(SiteId site, void* to, uint64_t bytes, const void* from) {
  times.global_scalar();
  machine_.memory.scalar_write(toucher(Pipe::kS, site), known_[index_of(Pipe::kS)], to, bytes, from);
}

void Core::clean_cache(SiteId site, const void* data, bool whole) {
  if (dropped(site)) return;
  const Toucher by = toucher(Pipe::kS, site);
  const Clock& clock = known_[index_of(Pipe::kS)];
  if (whole) {
    machine_.memory.clean_and_invalidate_all(by, clock);
  } else {
    machine_.memory.clean_and_invalidate(by, clock, data);
  }
}

// Instructions ------------------------------------------------------------------------------------------------------

void Core::issue(Pipe pipe, SiteId site, std::span<const Access> accesses, std::function<void()> effect) {
  const Toucher by = toucher(pipe, site);
  bool inside = true;
  // Reads first: an instruction may write where it reads.
  for (const Access& access : accesses) {
    if (!access.write) inside &= check_access(pipe, by, access);
  }
  for (const Access& access : accesses) {
    if (access.write) inside &= check_access(pipe, by, access);
  }
  if (!inside) return;
  take_time(pipe, site, accesses);
  if (machine_.options.schedule == Schedule::kEager) {
    effect();
  } else {
    push(pipe, {Pending::What::kRun, std::move(effect)});
  }
}

void Core::take_time(Pipe pipe, SiteId site, std::span<const Access> accesses) {
  uint64_t bytes = 0;  // of the largest operand
  for (const Access& access : accesses) bytes = std::max(bytes, access.bytes * access.rows);
  if (pipe == Pipe::kV) {
    times.vector(bytes, machine_.sites.at(site).api == "Gatherb");
  } else {
    times.copy(pipe, bytes);
  }
}

uint64_t Core::push(Pipe pipe, Pending pending) {
  Queue& queue = queues_[index_of(pipe)];
  queue.pending.push_back(std::move(pending));
  return queue.pushed();
}

// Executes the queue of `pipe` up to the entry that was pushed as number `position`.
void Core::drain(Pipe pipe, uint64_t position) {
  Queue& queue = queues_[index_of(pipe)];
  while (queue.executed < position && !queue.pending.empty()) {
    if (queue.pending.front().what != Pending::What::kRun) {
      const Pending fence = std::move(queue.pending.front());
      if (fence.what == Pending::What::kWait) drain(fence.wait_pipe, fence.wait_position);
      queue.pending.pop_front();
      ++queue.executed;
      continue;
    }
    // Nothing orders the instructions between two fences of a pipe: the last goes first.
    size_t count = 0;
    while (count < queue.pending.size() && queue.executed + count < position &&
           queue.pending[count].what == Pending::What::kRun) {
      ++count;
    }
    for (size_t i = count; i-- > 0;) queue.pending[i].run();
    queue.pending.erase(queue.pending.begin(), queue.pending.begin() + static_cast<std::ptrdiff_t>(count));
    queue.executed += count;
  }
}

void Core::drain_all() {
  const bool consumers_first = machine_.options.schedule == Schedule::kLazy;
  const Pipe first = consumers_first ? Pipe::kMte3 : Pipe::kMte2, last = consumers_first ? Pipe::kMte2 : Pipe::kMte3;
  for (Pipe pipe : {first, Pipe::kV, last}) {
    drain(pipe, queues_[index_of(pipe)].pushed());
  }
}

void Core::settle(Pipe pipe) {
  times.settle(pipe);
  drain(pipe, queues_[index_of(pipe)].pushed());
}

// Synchronisation ---------------------------------------------------------------------------------------------------

Core::EventState* Core::event(Pipe from, Pipe to, int id, SiteId site) {
  if (id < 0 || id >= kEventIds) {
    report(Kind::kEventId, site, "event id " + std::to_string(id) + " is outside 0..7");
    return nullptr;
  }
  return &events_[index_of(from)][index_of(to)][id];
}

void Core::set_flag(Pipe from, Pipe to, int id, SiteId site) {
  const bool off = dropped(site);
  EventState* state = event(from, to, id, site);
  if (!state) return;
  if (!state->handed_out) {
    report(Kind::kEventId, site,
           "event id " + std::to_string(id) + " comes from neither AllocEventID nor FetchEventID");
  }
  Flag& flag = state->flag;
  if (flag.set) report(Kind::kFlagSetTwice, site, "sets a flag that has not been waited for since", flag.site);
  flag.set = true;
  flag.time = times.flag_time(from);
  flag.dropped = off;
  flag.site = site;
  flag.clock = known_[index_of(from)];
  flag.clock.done[index_of(from)] = issued_[index_of(from)];
  if (!off && from != Pipe::kS) flag.position = push(from, {Pending::What::kSet, {}});
}

void Core::wait_flag(Pipe from, Pipe to, int id, SiteId site) {
  const bool off = dropped(site);
  EventState* state = event(from, to, id, site);
  if (!state) return;
  Flag& flag = state->flag;
  if (!flag.set) {
    report(Kind::kDeadlock, site,
           std::string("waits for a flag ") + pipe_name(from) + " to " + pipe_name(to) + " that was not set");
    stop();
  }
  flag.set = false;
  times.wait(to, flag.time);
  if (off || flag.dropped) return;
  known_[index_of(to)].join(flag.clock);
  if (from == Pipe::kS) return;  // the scalar unit sets flags at once
  if (to == Pipe::kS) {
    drain(from, flag.position);
  } else {
    push(to, {Pending::What::kWait, {}, from, flag.position});
  }
}

void Core::barrier(Pipe pipe, SiteId site) {
  if (dropped(site)) return;
  if (pipe == Pipe::kS) {
    report(Kind::kLimit, site, "PipeBarrier<PIPE_S> is a hardware error");
    return;
  }
  known_[index_of(pipe)].done[index_of(pipe)] = issued_[index_of(pipe)];
  push(pipe, {Pending::What::kFence, {}});
}

void Core::barrier_all(SiteId site) {
  if (site != kNoSite && dropped(site)) return;
  drain_all();
  times.all_at(times.end());
  for (Clock& clock : known_) clock.done = issued_;
}

void Core::sync_all(SiteId site) {
  if (dropped(site)) return;
  barrier_all(kNoSite);
  waiting_at = site;
  yield();
  waiting_at = kNoSite;
  if (cancelled) throw KernelStop{};
}

int Core::alloc_event(Pipe from, Pipe to, SiteId site) {
  auto& states = events_[index_of(from)][index_of(to)];
  for (int id = 0; id < kEventIds; ++id) {
    if (states[id].allocated) continue;
    states[id].allocated = states[id].handed_out = true;
    states[id].allocated_at = site;
    return id;
  }
  report(Kind::kEventId, site,
         std::string("all 8 event ids ") + pipe_name(from) + " to " + pipe_name(to) + " are taken",
         states[0].allocated_at);
  stop();
}

int Core::fetch_event(Pipe from, Pipe to, SiteId site) {
  auto& states = events_[index_of(from)][index_of(to)];
  for (int id = 0; id < kEventIds; ++id) {
    if (states[id].allocated) continue;
    states[id].handed_out = true;
    return id;
  }
  report(Kind::kEventId, site,
         std::string("all 8 event ids ") + pipe_name(from) + " to " + pipe_name(to) + " are taken",
         states[0].allocated_at);
  stop();
}

void Core::release_event(Pipe from, Pipe to, int id, SiteId site) {
  EventState* state = event(from, to, id, site);
  if (!state) return;
  if (!state->allocated) {
    report(Kind::kEventId, site, "releases event id " + std::to_string(id) + ", which is not taken");
  }
  if (state->flag.set) {
    report(Kind::kFlagLeak, site, "releases an event id whose flag is still set", state->flag.site);
  }
  state->allocated = state->handed_out = false;
}

void Core::reset_events() {
  for (auto& from : events_) {
    for (auto& to : from) {
      for (EventState& state : to) state.allocated = state.handed_out = false;
    }
  }
}

// Unified buffer ----------------------------------------------------------------------------------------------------

UbExtent Core::allocate(uint32_t bytes, SiteId site) {
  if (bytes > ub_bytes() - ub_used_) {
    report(Kind::kUbCapacity, site,
           "needs " + std::to_string(bytes) + " bytes of the unified buffer, " + std::to_string(ub_bytes() - ub_used_) +
               " of " + std::to_string(ub_bytes()) + " are left");
    stop();
  }
  const uint32_t begin = ub_used_;
  ub_used_ += bytes;
  allocations_.emplace_back();
  return {begin, ub_used_, static_cast<uint32_t>(allocations_.size() - 1), allocations_.back().generation};
}

void Core::reset_allocations() {
  for (Allocation& allocation : allocations_) ++allocation.generation;
  ub_used_ = 0;
  std::fill(initialised_.begin(), initialised_.end(), 0);
}

void Core::retire(UbExtent& extent, Pipe last_user) {
  extent.generation = ++allocations_[extent.allocation].generation;
  std::fill(initialised_.begin() + extent.begin / kBlockBytes, initialised_.begin() + extent.end / kBlockBytes, 0);
  auto poison = [this, extent] { std::memset(ub() + extent.begin, kPoison, extent.end - extent.begin); };
  if (machine_.options.schedule == Schedule::kEager || last_user == Pipe::kS) {
    poison();
  } else {
    push(last_user, {Pending::What::kFence, {}});
    push(last_user, {Pending::What::kRun, poison});
  }
}

void Core::finish() {
  drain_all();
  for (auto& from : events_) {
    for (auto& to : from) {
      for (EventState& state : to) {
        if (state.flag.set) report(Kind::kFlagLeak, state.flag.site, "its flag is still set when the kernel ends");
        if (state.allocated) report(Kind::kEventId, state.allocated_at, "its event id is never released");
      }
    }
  }
  machine_.memory.end_core({index_, Pipe::kS, issued_[0] + 1, epoch, kNoSite});
}

}  // namespace acpu
