#include "report.h"

#include <sstream>
#include <tuple>

#include "clock.h"
#include "sites.h"

namespace acpu {

const char* kind_name(Kind kind) {
  switch (kind) {
    case Kind::kUbOutOfBounds: return "ub-out-of-bounds";
    case Kind::kUbCapacity: return "ub-capacity";
    case Kind::kUninitialisedRead: return "uninitialised-read";
    case Kind::kUseAfterFree: return "use-after-free";
    case Kind::kRace: return "race";
    case Kind::kFlagSetTwice: return "flag-set-twice";
    case Kind::kDeadlock: return "deadlock";
    case Kind::kFlagLeak: return "flag-leak";
    case Kind::kEventId: return "event-id";
    case Kind::kQueue: return "queue";
    case Kind::kAlignment: return "alignment";
    case Kind::kLimit: return "limit";
    case Kind::kOverlap: return "overlap";
    case Kind::kGmOutOfBounds: return "gm-out-of-bounds";
    case Kind::kReadOnlyWrite: return "read-only-write";
    case Kind::kCrossCoreRace: return "cross-core-race";
    case Kind::kSharedLine: return "shared-line";
    case Kind::kUnflushedWrite: return "unflushed-write";
    case Kind::kStaleRead: return "stale-read";
    case Kind::kLineClobber: return "line-clobber";
    case Kind::kException: return "exception";
  }
  return "?";
}

const char* pipe_name(Pipe pipe) {
  static constexpr const char* kNames[kPipes] = {"S", "V", "MTE2", "MTE3"};
  return kNames[index_of(pipe)];
}

std::string Site::key() const {
  return file + ":" + std::to_string(line) + ":" + std::to_string(column);
}

bool Result::has(Kind kind) const {
  for (const Report& report : reports) {
    if (report.kind == kind) return true;
  }
  return false;
}

std::string Result::text() const {
  std::ostringstream out;
  for (const Report& report : reports) {
    out << "[" << kind_name(report.kind) << "] core " << report.core << ": " << report.message;
    if (report.count > 1) out << " (" << report.count << " times)";
    out << "\n";
  }
  return out.str();
}

SiteId SiteTable::intern(const char* api, const Loc& loc) {
  const Key key{loc.file_name(), api, (uint64_t{loc.line()} << 20) ^ loc.column()};
  auto [found, added] = ids_.try_emplace(key, static_cast<SiteId>(sites_.size()));
  if (added) sites_.push_back({loc.file_name(), loc.function_name(), loc.line(), loc.column(), api});
  return found->second;
}

std::string SiteTable::describe(SiteId id) const {
  if (id == kNoSite) return "start";
  const Site& site = sites_[id];
  return site.api + " at " + site.key();
}

void ReportLog::add(Kind kind, int core, SiteId site, SiteId other, const std::string& what) {
  auto [found, added] = seen_.try_emplace({kind, site, other}, reports_.size());
  if (!added) {
    ++reports_[found->second].count;
    return;
  }
  std::string message = sites_.describe(site) + ": " + what;
  if (other != kNoSite) message += "; earlier: " + sites_.describe(other);
  reports_.push_back({kind, core, sites_.at(site), sites_.at(other), std::move(message), 1});
}

}  // namespace acpu
