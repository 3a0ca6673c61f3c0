// A table from token ids to numbers that costs by the ids put in, not by the range of ids.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvoffload {

class IdTable {
 public:
  // Makes room for `ids` ids. The table must be empty.
  void reserve(std::int64_t ids) {
    const int before = bits_;
    while ((std::int64_t{1} << bits_) < 2 * ids) ++bits_;
    if (bits_ == before && !entries_.empty()) return;
    entries_.assign(std::size_t{1} << bits_, Entry{kFree, 0});
  }

  // The number of `id`, not negative; -1: not there.
  std::int32_t find(std::int32_t id) const {
    const Entry& entry = entries_[place(id)];
    return entry.id == id ? entry.value : -1;
  }

  // False when the id is there already, and stays as it is.
  bool insert(std::int32_t id, std::int32_t value) {
    const std::size_t at = place(id);
    if (entries_[at].id == id) return false;
    entries_[at] = {id, value};
    used_.push_back(at);
    return true;
  }

  void clear() {
    for (const std::size_t at : used_) entries_[at].id = kFree;
    used_.clear();
  }

 private:
  static constexpr std::int32_t kFree = -1;

  struct Entry {
    std::int32_t id;
    std::int32_t value;
  };

  // Position of the id, or its insertion position.
  std::size_t place(std::int32_t id) const {
    const std::size_t last = entries_.size() - 1;
    std::size_t at = (static_cast<std::uint32_t>(id) * std::uint64_t{2654435769u} >> (32 - bits_)) & last;
    while (entries_[at].id != id && entries_[at].id != kFree) at = (at + 1) & last;
    return at;
  }

  std::vector<Entry> entries_;
  std::vector<std::size_t> used_;
  int bits_ = 1;
};

}  // namespace kvoffload
