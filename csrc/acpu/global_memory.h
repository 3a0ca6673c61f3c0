// Global memory: registered regions, their shadow, and the scalar data cache of every core in front of it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "acpu.h"
#include "shadow.h"

namespace acpu {

struct Line {
  History history;
  uint64_t initialised = 0;
  uint64_t cached_by = 0;  // bit per core
  uint64_t dirty_in = 0;   // bit per core
};

struct Region {
  uint8_t* data;
  size_t bytes;
  RegionUse use;
  std::string name;
  uintptr_t first_line;
  std::vector<Line> lines;
};

// A line in a core's data cache.
struct CachedLine {
  std::array<uint8_t, kLineBytes> data;
  uint64_t dirty = 0;
  uint64_t stale = 0;  // bytes that changed in global memory since the line was loaded
  SiteId written_at = kNoSite;
  SiteId changed_at = kNoSite;
};

class GlobalMemory {
 public:
  GlobalMemory(ReportLog& log, int cores, bool write_through)
      : log_(log), caches_(cores), write_through_(write_through) {}

  void add(uint8_t* data, size_t bytes, RegionUse use, std::string name);

  // The region that holds [data, data+bytes), or nullptr after a report.
  Region* find(const void* data, uint64_t bytes, const Toucher& by, bool write);

  // An access by a copy engine. Reports; false if the bytes are outside every region.
  bool copy_access(const Toucher& by, const Clock& clock, const void* data, uint64_t bytes, bool write);

  // Scalar accesses, through the core's data cache.
  void scalar_read(const Toucher& by, const Clock& clock, const void* from, uint64_t bytes, void* to);
  void scalar_write(const Toucher& by, const Clock& clock, void* to, uint64_t bytes, const void* from);
  void clean_and_invalidate(const Toucher& by, const Clock& clock, const void* data);
  void clean_and_invalidate_all(const Toucher& by, const Clock& clock);

  // End of a core: reports lines that were never cleaned and drops them.
  void end_core(const Toucher& by);

 private:
  using Cache = std::unordered_map<uintptr_t, CachedLine>;

  template <class Visit>
  static void each_line(const void* data, uint64_t bytes, Visit visit);
  Line& line_at(Region& region, uintptr_t line) { return region.lines[line - region.first_line]; }
  void check(const Toucher& by, const Clock& clock, const Region& region, Line& line, uint64_t bytes, bool write);
  void check_dirty(const Toucher& by, Line& line, uintptr_t number, uint64_t bytes, bool write);
  void mark_stale(const Toucher& by, Line& line, uintptr_t number, uint64_t bytes, bool own_cache);
  CachedLine& load(const Toucher& by, Region& region, uintptr_t number);
  void clean(const Toucher& by, const Clock& clock, uintptr_t number, CachedLine& cached, uint64_t part);

  ReportLog& log_;
  std::vector<Region> regions_;
  std::vector<Cache> caches_;
  size_t last_ = 0;
  bool write_through_;
};

}  // namespace acpu
