// The twin's report on a run: findings, and the synchronisation sites that the run reached.
#pragma once

#include <cstdint>
#include <source_location>
#include <string>
#include <vector>

#include "cost.h"

namespace acpu {

// One kind per rule of docs/acpu.md.
enum class Kind : uint8_t {
  kUbOutOfBounds,      // an access outside its tensor
  kUbCapacity,         // buffers larger than the unified buffer
  kUninitialisedRead,  // unified-buffer or global bytes that nothing wrote
  kUseAfterFree,       // a tensor used after FreeTensor or TPipe::Reset
  kRace,               // two conflicting accesses of one core that no synchronisation orders
  kFlagSetTwice,       // SetFlag on a flag that is still set
  kDeadlock,           // WaitFlag, DeQue or SyncAll that nothing can satisfy
  kFlagLeak,           // a flag still set when the kernel ends
  kEventId,            // event id out of range, exhausted, not owned, or not released
  kQueue,              // TQue misuse: depth, AllocTensor/FreeTensor, EnQue/DeQue imbalance
  kAlignment,          // an address or length that breaks an alignment rule
  kLimit,              // a parameter outside its documented range, or an unsupported type
  kOverlap,            // operands of one instruction overlap in a way that is not allowed
  kGmOutOfBounds,      // global memory outside every registered region
  kReadOnlyWrite,      // a write to a region registered as input
  kCrossCoreRace,      // two cores, one of them writing, without a SyncAll between them
  kSharedLine,         // two cores write one 64-byte line without a SyncAll between them
  kUnflushedWrite,     // a scalar write to global memory that the data cache still holds
  kStaleRead,          // a scalar read served by a line that changed since it was cached
  kLineClobber,        // a cache write-back that overwrites newer bytes of its line
  kException,          // the kernel threw
};

const char* kind_name(Kind kind);

// A call in the kernel. `api` is the AscendC name, e.g. "SetFlag".
struct Site {
  std::string file;
  std::string function;
  uint32_t line = 0;
  uint32_t column = 0;
  std::string api;

  // "file:line:column", stable over runs of one build; accepted by Options::drop.
  std::string key() const;
};

struct Report {
  Kind kind;
  int core;             // the first core that showed it
  Site site;            // the call that showed it
  Site other;           // the earlier call it conflicts with; api is empty if there is none
  std::string message;  // one line, with both places
  uint64_t count;       // how often this pair of places showed it
};

struct SyncSite {
  Site site;
  uint64_t hits;  // calls over all cores
};

struct Result {
  std::vector<Report> reports;
  std::vector<SyncSite> sync_sites;  // by file, line and column
  Cost cost;                         // see cost.h; of the eager schedule
  bool completed = true;             // false: a core was stopped (deadlock, capacity, bad queue use)

  bool clean() const { return reports.empty(); }
  bool has(Kind kind) const;
  std::string text() const;  // one report a line
};

}  // namespace acpu
