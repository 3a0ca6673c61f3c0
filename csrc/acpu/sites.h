// Call sites as small numbers, and the reports that name them.
#pragma once

#include <map>
#include <set>
#include <source_location>
#include <string>
#include <unordered_map>
#include <vector>

#include "report.h"

namespace acpu {

using Loc = std::source_location;
using SiteId = uint32_t;
inline constexpr SiteId kNoSite = 0;

class SiteTable {
 public:
  SiteTable() { sites_.emplace_back(); }

  SiteId intern(const char* api, const Loc& loc);
  const Site& at(SiteId id) const { return sites_[id]; }
  std::string describe(SiteId id) const;
  size_t size() const { return sites_.size(); }

 private:
  struct Key {
    const char* file;
    const char* api;
    uint64_t place;
    bool operator==(const Key&) const = default;
  };
  struct Hash {
    size_t operator()(const Key& key) const {
      return std::hash<const void*>()(key.file) * 31 + std::hash<const void*>()(key.api) * 7 + key.place * 0x9e3779b9u;
    }
  };

  std::vector<Site> sites_;
  std::unordered_map<Key, SiteId, Hash> ids_;
};

// Findings, one per kind and pair of places.
class ReportLog {
 public:
  explicit ReportLog(const SiteTable& sites) : sites_(sites) {}

  void add(Kind kind, int core, SiteId site, SiteId other, const std::string& what);
  std::vector<Report> take() { return std::move(reports_); }

 private:
  const SiteTable& sites_;
  std::vector<Report> reports_;
  std::map<std::tuple<Kind, SiteId, SiteId>, size_t> seen_;
};

}  // namespace acpu
