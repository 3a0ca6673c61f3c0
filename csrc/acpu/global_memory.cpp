#include "global_memory.h"

#include <cstring>

namespace acpu {

namespace {

std::string byte_text(uint64_t count) { return std::to_string(count) + " byte" + (count == 1 ? "" : "s"); }

const char* hazard(bool earlier_write, bool write) {
  if (earlier_write) return write ? "write after write" : "read after write";
  return "write after read";
}

}  // namespace

void GlobalMemory::add(uint8_t* data, size_t bytes, RegionUse use, std::string name) {
  const uintptr_t first = reinterpret_cast<uintptr_t>(data) / kLineBytes;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(data) + bytes - 1) / kLineBytes;
  regions_.push_back({data, bytes, use, std::move(name), first, std::vector<Line>(last - first + 1)});
  if (use != RegionUse::kOut) {
    for (Line& line : regions_.back().lines) line.initialised = ~uint64_t{0};
  } else {
    std::memset(data, kPoison, bytes);
  }
}

Region* GlobalMemory::find(const void* data, uint64_t bytes, const Toucher& by, bool write) {
  const auto* start = static_cast<const uint8_t*>(data);
  auto holds = [&](const Region& region) {
    return start >= region.data && bytes <= region.bytes && start <= region.data + (region.bytes - bytes);
  };
  if (last_ >= regions_.size() || !holds(regions_[last_])) {
    for (last_ = 0; last_ < regions_.size() && !holds(regions_[last_]); ++last_) {
    }
  }
  if (last_ >= regions_.size()) {
    std::string near;
    for (const Region& region : regions_) {
      if (start + bytes > region.data && start < region.data + region.bytes + 4096) {
        near = ", offset " + std::to_string(start - region.data) + " of region " + region.name + " (" +
               byte_text(region.bytes) + ")";
      }
    }
    log_.add(Kind::kGmOutOfBounds, by.core, by.site, kNoSite,
             std::string(write ? "writes " : "reads ") + byte_text(bytes) + " outside every region" + near);
    return nullptr;
  }
  Region& region = regions_[last_];
  if (write && region.use == RegionUse::kIn) {
    log_.add(Kind::kReadOnlyWrite, by.core, by.site, kNoSite, "writes to input region " + region.name);
  }
  return &region;
}

template <class Visit>
void GlobalMemory::each_line(const void* data, uint64_t bytes, Visit visit) {
  uintptr_t at = reinterpret_cast<uintptr_t>(data);
  uint64_t done = 0;
  while (done < bytes) {
    const uint32_t offset = at % kLineBytes;
    const uint32_t part = static_cast<uint32_t>(std::min<uint64_t>(kLineBytes - offset, bytes - done));
    visit(at / kLineBytes, offset, part, done);
    at += part;
    done += part;
  }
}

void GlobalMemory::check(const Toucher& by, const Clock& clock, const Region& region, Line& line, uint64_t bytes,
                         bool write) {
  if (region.use == RegionUse::kIn && !write) return;  // nothing can conflict with it
  if (!write && (bytes & ~line.initialised)) {
    log_.add(Kind::kUninitialisedRead, by.core, by.site, kNoSite,
             "reads " + byte_text(std::popcount(bytes & ~line.initialised)) + " of global memory that nothing wrote");
  }
  line.history.touch(
      by, bytes, write, clock,
      [&](const Record& record) {
        log_.add(Kind::kRace, by.core, by.site, record.site,
                 std::string("global memory, ") + hazard(record.write, write) + ", " + pipe_name(by.pipe) +
                     " not ordered after " + pipe_name(record.pipe));
      },
      [&](const Record& record, uint64_t overlap) {
        log_.add(overlap ? Kind::kCrossCoreRace : Kind::kSharedLine, by.core, by.site, record.site,
                 (overlap ? std::string("global memory, ") + hazard(record.write, write)
                          : std::string("writes a 64-byte line that another core writes")) +
                     ", cores " + std::to_string(by.core) + " and " + std::to_string(record.core) +
                     " without a SyncAll between");
      });
  if (write) line.initialised |= bytes;
}

void GlobalMemory::check_dirty(const Toucher& by, Line& line, uintptr_t number, uint64_t bytes, bool write) {
  uint64_t holders = line.dirty_in;
  if (by.pipe == Pipe::kS) holders &= ~(uint64_t{1} << by.core);
  for (; holders; holders &= holders - 1) {
    const int core = std::countr_zero(holders);
    const CachedLine& cached = caches_[core].at(number);
    if (!(cached.dirty & bytes)) continue;
    log_.add(Kind::kUnflushedWrite, by.core, by.site, cached.written_at,
             std::string(write ? "writes" : "reads") + " bytes that a scalar write of core " + std::to_string(core) +
                 " still holds in its data cache");
  }
}

void GlobalMemory::mark_stale(const Toucher& by, Line& line, uintptr_t number, uint64_t bytes, bool own_cache) {
  uint64_t holders = line.cached_by;
  if (!own_cache) holders &= ~(uint64_t{1} << by.core);
  for (; holders; holders &= holders - 1) {
    CachedLine& cached = caches_[std::countr_zero(holders)].at(number);
    cached.stale |= bytes;
    cached.changed_at = by.site;
  }
}

bool GlobalMemory::copy_access(const Toucher& by, const Clock& clock, const void* data, uint64_t bytes, bool write) {
  Region* region = find(data, bytes, by, write);
  if (!region) return false;
  each_line(data, bytes, [&](uintptr_t number, uint32_t offset, uint32_t part, uint64_t) {
    Line& line = line_at(*region, number);
    const uint64_t mask = bit_range(offset, part);
    if (line.dirty_in) check_dirty(by, line, number, mask, write);
    check(by, clock, *region, line, mask, write);
    if (write && line.cached_by) mark_stale(by, line, number, mask, true);
  });
  return true;
}

CachedLine& GlobalMemory::load(const Toucher& by, Region& region, uintptr_t number) {
  auto [found, added] = caches_[by.core].try_emplace(number);
  if (added) {
    // The host's buffers need not start or end on a line; bytes outside the region must not be read.
    auto* start = reinterpret_cast<uint8_t*>(number * kLineBytes);
    uint8_t* from = std::max(start, region.data);
    uint8_t* to = std::min(start + kLineBytes, region.data + region.bytes);
    found->second.data.fill(kPoison);
    std::memcpy(found->second.data.data() + (from - start), from, to - from);
    line_at(region, number).cached_by |= uint64_t{1} << by.core;
  }
  return found->second;
}

void GlobalMemory::scalar_read(const Toucher& by, const Clock& clock, const void* from, uint64_t bytes, void* to) {
  Region* region = find(from, bytes, by, false);
  if (!region) {
    std::memset(to, kPoison, bytes);
    return;
  }
  each_line(from, bytes, [&](uintptr_t number, uint32_t offset, uint32_t part, uint64_t done) {
    Line& line = line_at(*region, number);
    const uint64_t mask = bit_range(offset, part);
    if (line.dirty_in) check_dirty(by, line, number, mask, false);
    check(by, clock, *region, line, mask, false);
    CachedLine& cached = load(by, *region, number);
    if (cached.stale & mask) {
      log_.add(Kind::kStaleRead, by.core, by.site, cached.changed_at,
               "scalar read of a cached line that has changed since; DataCacheCleanAndInvalid is missing");
    }
    std::memcpy(static_cast<uint8_t*>(to) + done, cached.data.data() + offset, part);
  });
}

void GlobalMemory::scalar_write(const Toucher& by, const Clock& clock, void* to, uint64_t bytes, const void* from) {
  Region* region = find(to, bytes, by, true);
  if (!region) return;
  each_line(to, bytes, [&](uintptr_t number, uint32_t offset, uint32_t part, uint64_t done) {
    Line& line = line_at(*region, number);
    const uint64_t mask = bit_range(offset, part);
    if (line.dirty_in) check_dirty(by, line, number, mask, true);
    check(by, clock, *region, line, mask, true);
    CachedLine& cached = load(by, *region, number);
    std::memcpy(cached.data.data() + offset, static_cast<const uint8_t*>(from) + done, part);
    cached.dirty |= mask;
    cached.stale &= ~mask;
    cached.written_at = by.site;
    line.dirty_in |= uint64_t{1} << by.core;
  });
  if (write_through_) std::memcpy(to, from, bytes);
}

void GlobalMemory::clean(const Toucher& by, const Clock& clock, uintptr_t number, CachedLine& cached, uint64_t part) {
  auto* start = reinterpret_cast<uint8_t*>(number * kLineBytes);
  Region* region = nullptr;
  for (Region& candidate : regions_) {
    if (number >= candidate.first_line && number < candidate.first_line + candidate.lines.size()) region = &candidate;
  }
  Line& line = line_at(*region, number);
  const uint64_t dirty = cached.dirty & part;
  const auto offset = static_cast<uint32_t>(std::countr_zero(part));
  uint8_t* from = std::max(start + offset, region->data);
  uint8_t* to = std::min(start + kLineBytes, region->data + region->bytes);
  if (dirty) {
    if (cached.stale & ~cached.dirty & part) {
      log_.add(Kind::kLineClobber, by.core, by.site, cached.changed_at,
               "writes a 64-byte line back, over bytes that changed since it was cached");
    }
    // A write-back moves the line, stale bytes included.
    if (to > from) std::memcpy(from, cached.data.data() + (from - start), to - from);
    check(by, clock, *region, line, dirty, true);
    mark_stale(by, line, number, dirty, false);
    cached.dirty &= ~part;
    if (!cached.dirty) line.dirty_in &= ~(uint64_t{1} << by.core);
  }
  if (part != ~uint64_t{0} && to > from) {  // the rest stays cached
    std::memcpy(cached.data.data() + (from - start), from, to - from);
    cached.stale &= ~part;
  } else {
    line.cached_by &= ~(uint64_t{1} << by.core);
  }
}

void GlobalMemory::clean_and_invalidate(const Toucher& by, const Clock& clock, const void* data) {
  if (!find(data, 1, by, false)) return;
  const uintptr_t number = reinterpret_cast<uintptr_t>(data) / kLineBytes;
  const uint32_t offset = reinterpret_cast<uintptr_t>(data) % kLineBytes;
  auto found = caches_[by.core].find(number);
  if (found == caches_[by.core].end()) return;
  // Only the bytes from the address to the end of its line.
  clean(by, clock, number, found->second, bit_range(offset, kLineBytes - offset));
  if (offset == 0) caches_[by.core].erase(found);
}

void GlobalMemory::clean_and_invalidate_all(const Toucher& by, const Clock& clock) {
  for (auto& [number, cached] : caches_[by.core]) clean(by, clock, number, cached, ~uint64_t{0});
  caches_[by.core].clear();
}

void GlobalMemory::end_core(const Toucher& by) {
  for (auto& [number, cached] : caches_[by.core]) {
    for (Region& region : regions_) {
      if (number < region.first_line || number >= region.first_line + region.lines.size()) continue;
      line_at(region, number).cached_by &= ~(uint64_t{1} << by.core);
      line_at(region, number).dirty_in &= ~(uint64_t{1} << by.core);
    }
    if (!cached.dirty) continue;
    log_.add(Kind::kUnflushedWrite, by.core, cached.written_at, kNoSite,
             "scalar write to global memory that no DataCacheCleanAndInvalid writes back");
  }
  caches_[by.core].clear();
}

}  // namespace acpu
