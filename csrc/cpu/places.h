// Where an id may be resident, for each placement: its ways are numbered from 0 as if they were one set's, whichever sets
// they are in. Masks of ways and the numbers that a policy handles are of that kind. Internal linkage, see
// plan_kernel.h, which includes this after the definition of `Lanes`.
#pragma once

#include "../policies/placement.h"
#include "lanes.h"

namespace kvoffload {
namespace {

constexpr int kPlaceBlock = 16;  // ids that are looked up together

inline int lowest(std::uint32_t mask) { return __builtin_ctz(mask); }

// W ways, all in the set `id mod sets`.
template <int W>
class OneSet {
 public:
  static constexpr int kWays = W;     // of an id
  static constexpr int kSetWays = W;  // of a set

  struct Home {
    std::uint32_t first;  // slot of way 0
  };
  struct Homes {
    alignas(64) std::uint32_t first[kPlaceBlock];
  };

  explicit OneSet(std::int32_t sets) : set_mask_(static_cast<std::uint32_t>(sets - 1)) {}

  std::uint32_t set_of(std::int32_t id) const { return static_cast<std::uint32_t>(id) & set_mask_; }
  Home home_of(std::int32_t id) const { return near(set_of(id)); }
  static Home near(std::uint32_t set) { return {set * W}; }  // ways for an id displaced into this set
  static std::uint32_t set_of(Home home) { return home.first / W; }
  static std::int32_t slot(Home home, int way) { return static_cast<std::int32_t>(home.first) + way; }
  static int emptiest(std::uint32_t empty) { return lowest(empty); }

  static std::uint32_t match(const std::int32_t* tags, Home home, std::int32_t id) {
    return Lanes<W>::match(tags + home.first, id);
  }
  static std::uint32_t zero(const std::uint8_t* bytes, Home home) { return Lanes<W>::zero(bytes + home.first); }
  template <int kBit>
  static std::uint32_t with_bit(const std::uint8_t* ages, Home home) {
    return Lanes<W>::template with_bit<kBit>(ages + home.first);
  }
  static void fill(std::uint8_t* ages, Home home, std::uint32_t ways, std::uint8_t age) {
    Lanes<W>::fill(ages + home.first, ways, age);
  }
  static void add(std::uint8_t* ages, Home home, std::uint32_t ways, std::uint8_t more) {
    Lanes<W>::add(ages + home.first, ways, more);
  }

  static void prefetch(const std::int32_t* tags, const std::uint8_t* ages, Home home) {
    __builtin_prefetch(tags + home.first);
    if constexpr (W == 32) __builtin_prefetch(tags + home.first + 16);
    __builtin_prefetch(ages + home.first, 1);
  }

  // The same for a block of ids: their homes, the way of one of them, and each id's slot less the number of its way.
  void locate(const std::int32_t* ids, Homes& homes) const {
    for (int j = 0; j < kPlaceBlock; ++j) homes.first[j] = set_of(ids[j]) * W;
  }
  static std::uint32_t match(const std::int32_t* tags, const Homes& homes, int j, std::int32_t id) {
    return Lanes<W>::match(tags + homes.first[j], id);
  }
  static const std::uint32_t* bases(Homes& homes, const std::uint32_t*) { return homes.first; }

 private:
  const std::uint32_t set_mask_;
};

// W ways: half of them in the set `id mod sets`, the others in another set of the same block of sets.
template <int W>
class TwoSets {
 public:
  static constexpr int kWays = W;
  static constexpr int kSetWays = W / 2;

  struct Home {
    std::uint32_t first;   // slot of way 0
    std::uint32_t second;  // slot of way W / 2
  };
  struct Homes {
    alignas(64) std::uint32_t first[kPlaceBlock];
    alignas(64) std::uint32_t second[kPlaceBlock];
  };

  explicit TwoSets(std::int32_t sets)
      : set_mask_(static_cast<std::uint32_t>(sets - 1)),
        shift_(static_cast<std::uint32_t>(__builtin_ctz(static_cast<std::uint32_t>(sets)))),
        block_(set_mask_ < kBlockSets ? set_mask_ + 1 : kBlockSets) {}

  std::uint32_t set_of(std::int32_t id) const { return static_cast<std::uint32_t>(id) & set_mask_; }
  Home home_of(std::int32_t id) const {
    const std::uint32_t set = set_of(id);
    return {set * H, other_set(set, static_cast<std::uint32_t>(id) >> shift_, block_) * H};
  }
  static Home near(std::uint32_t set) { return {set * H, (set ^ 1u) * H}; }
  static std::uint32_t set_of(Home home) { return home.first / H; }
  static std::int32_t slot(Home home, int way) {
    const std::uint32_t second = all_if_negative(static_cast<std::int32_t>(H) - 1 - way);
    return static_cast<std::int32_t>(home.first ^ ((home.first ^ (home.second - H)) & second)) + way;
  }
  // The lowest of the set that has more of them.
  static int emptiest(std::uint32_t empty) {
    const std::uint32_t first = empty & kFirst, second = empty >> H;
    return __builtin_popcount(second) > __builtin_popcount(first) ? H + lowest(second) : lowest(first);
  }

  static std::uint32_t match(const std::int32_t* tags, Home home, std::int32_t id) {
    return Pair<kSetWays>::match(tags + home.first, tags + home.second, id);
  }
  static std::uint32_t zero(const std::uint8_t* bytes, Home home) {
    return Pair<kSetWays>::zero(bytes + home.first, bytes + home.second);
  }
  template <int kBit>
  static std::uint32_t with_bit(const std::uint8_t* ages, Home home) {
    return Pair<kSetWays>::template with_bit<kBit>(ages + home.first, ages + home.second);
  }
  static void fill(std::uint8_t* ages, Home home, std::uint32_t ways, std::uint8_t age) {
    Pair<kSetWays>::fill(ages + home.first, ages + home.second, ways, age);
  }
  static void add(std::uint8_t* ages, Home home, std::uint32_t ways, std::uint8_t more) {
    Pair<kSetWays>::add(ages + home.first, ages + home.second, ways, more);
  }

  static void prefetch(const std::int32_t* tags, const std::uint8_t* ages, Home home) {
    __builtin_prefetch(tags + home.first);
    __builtin_prefetch(tags + home.second);
    __builtin_prefetch(ages + home.first, 1);
    __builtin_prefetch(ages + home.second, 1);
  }

  void locate(const std::int32_t* ids, Homes& homes) const {
    typedef std::uint32_t Block __attribute__((vector_size(4 * kPlaceBlock)));
    Block id;
    __builtin_memcpy(&id, ids, sizeof id);
    const Block set = id & set_mask_;
    const Block first = set * H;
    const Block second = (set ^ (((id >> shift_) * kScrambler >> 16 & (block_ - 1)) | 1u)) * H;
    __builtin_memcpy(homes.first, &first, sizeof first);
    __builtin_memcpy(homes.second, &second, sizeof second);
    // Read back one by one from memory: GCC would take them out of the vector, at two instructions each.
    asm("" : "+m"(homes));
  }
  static std::uint32_t match(const std::int32_t* tags, const Homes& homes, int j, std::int32_t id) {
    return Pair<kSetWays>::match(tags + homes.first[j], tags + homes.second[j], id);
  }
  static const std::uint32_t* bases(Homes& homes, const std::uint32_t* found) {
    for (int j = 0; j < kPlaceBlock; ++j) {
      const std::uint32_t second = all_if_negative(static_cast<std::int32_t>(kFirst - found[j]));
      homes.first[j] ^= (homes.first[j] ^ (homes.second[j] - H)) & second;
    }
    return homes.first;
  }

 private:
  // Arithmetic, where a comparison would end up as a branch: which of its sets an id is in is unpredictable.
  static std::uint32_t all_if_negative(std::int32_t number) { return static_cast<std::uint32_t>(number >> 31); }

  static constexpr std::uint32_t H = kSetWays;
  static constexpr std::uint32_t kFirst = (1u << H) - 1;

  const std::uint32_t set_mask_;
  const std::uint32_t shift_;
  const std::uint32_t block_;
};

// A policy's view of an id's ways, see ../policies/policy.h.
template <class Places>
class PlaceAges {
 public:
  PlaceAges(std::uint8_t* ages, typename Places::Home home) : ages_(ages), home_(home) {}

  template <int kBit>
  std::uint32_t with_bit() const {
    return Places::template with_bit<kBit>(ages_, home_);
  }
  void set(std::uint32_t ways, std::uint8_t age) { Places::fill(ages_, home_, ways, age); }
  void add(std::uint32_t ways, std::uint8_t more) { Places::add(ages_, home_, ways, more); }

  // First set bit at or after `hand`, going round. `ways` has at least one bit below kWays.
  int first_from(std::uint32_t ways, int hand) const {
    constexpr int kWays = Places::kWays;
    const std::uint64_t doubled = (std::uint64_t{ways} << kWays) | ways;
    return (hand + __builtin_ctzll(doubled >> hand)) & (kWays - 1);
  }

 private:
  std::uint8_t* const ages_;
  const typename Places::Home home_;
};

}  // namespace
}  // namespace kvoffload
