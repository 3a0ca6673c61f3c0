// The plan of one request, written once and compiled once per instruction set. The including file defines, in an
// anonymous namespace before this header, `Lanes<16>` and `Lanes<32>` with the vector primitives, and `Pair<8>` or `Lanes<8>`:
//   match(tags, id)            mask of the ways whose tag is `id`
//   zero(bytes)                mask of the ways whose byte is 0
//   with_bit<kBit>(ages)       mask of the ways whose age has that bit
//   fill(ages, ways, value)    ages of `ways` become `value`
//   add(ages, ways, delta)     ages of `ways` grow by `delta`
//   settle_partition<P>(ages, needed, slots)   gives the needed slots of a partition their age after a hit, by policy
//                              P; returns their number; `needed` holds 0 and 1 only
//   settle_block(...)          settle_position for 16 positions, see lanes.h
//
// Everything here has internal linkage and uses no library templates: a linker that merged an inline function
// compiled for AVX-512 into the common path would crash older processors.
#pragma once

#include "../policies/policies.h"
#include "lanes.h"
#include "places.h"
#include "plan_request.h"

namespace kvoffload {
namespace {

constexpr std::int32_t kEmpty = -1;

// Prefetches the next request's partition into the cache while this one is planned, a few lines at a time throughout
// the plan: a core has a couple of dozen outstanding line fetches; a larger burst would delay the look-ups behind it.
class NextPartition {
 public:
  NextPartition(const NextPartitionView& view, std::int64_t positions, std::int64_t expected_misses)
      : tags_(view.tags),
        ages_(view.ages),
        left_(view.slots),
        hurry_(left_ / kStep - expected_misses > positions / 8) {}

  // Called per block of 16 marked ids. Two steps; four if two would leave more steps than there are expected misses.
  void advance_block() {
    advance();
    advance();
    if (!hurry_) return;
    advance();
    advance();
  }

  // Called per miss. Does nothing once the whole partition is fetched.
  void advance() {
    if (left_ <= 0) return;
    __builtin_prefetch(tags_);
    __builtin_prefetch(tags_ + 16);
    __builtin_prefetch(ages_, 1);
    tags_ += kStep;
    ages_ += kStep;
    left_ -= kStep;
  }

  void finish() {
    while (left_ > 0) advance();
  }

 private:
  static constexpr std::int64_t kStep = 32;  // slots: two lines of tags and half a line of ages
  const std::int32_t* tags_;
  const std::uint8_t* ages_;
  std::int64_t left_;
  bool hurry_;
};

// Output lists and counters of the marking loop.
struct Marked {
  std::int32_t* pending;  // end of the list
  std::int32_t invalid;
};

// Looks up query positions and marks the hits: their slots, the needed slots, and the remaining positions. This is the
// plan's only loop over all ids. It has no branches on the outcome, which is unpredictable: a misprediction costs more
// than the whole look-up. A block is settled after the look-up of the next one: reading 16 masks as one vector
// immediately after writing them one by one would stall on the store buffer.
template <class Places>
class Marker {
 public:
  Marker(const RequestJob& job, const Scratch& scratch, std::int32_t last_position)
      : ids_(job.topk),
        slots_(job.slots),
        tags_(job.tags),
        ages_(job.ages),
        needed_(scratch.needed),
        places_(job.sets),
        limit_(static_cast<std::uint32_t>(last_position)),
        fetched_(job.fetched) {}

  [[gnu::noinline]] Marked run(std::int32_t begin, std::int32_t end, Marked marked,
                               NextPartition& next_partition) const {
    NextPartition next = next_partition;
    Block blocks[2];
    Block* block = blocks;
    Block* before = nullptr;  // looked up but not settled
    std::int32_t i = begin;
    for (; i + kBlock <= end; i += kBlock) {
      next.advance_block();
      if (!fetched_ && i + kAhead + kBlock <= end) prefetch(ids_ + i + kAhead);
      const bool regular = all_valid(ids_ + i);
      if (regular) look_up(i, *block);
      if (before != nullptr) settle(*before, marked);
      before = regular ? block : nullptr;
      block = block == blocks ? blocks + 1 : blocks;
      if (!regular) mark_each(i, i + kBlock, marked);
    }
    if (before != nullptr) settle(*before, marked);
    mark_each(i, end, marked);
    next_partition = next;
    return marked;
  }

 private:
  static constexpr std::int32_t kBlock = kPlaceBlock;
  static constexpr std::int32_t kAhead = 48;  // look-ahead in ids, for a partition that was not fetched as a whole

  struct Block {
    typename Places::Homes homes;
    alignas(64) std::uint32_t found[kBlock];  // the id's way as a mask, or 0
    std::int32_t first;
  };

  bool valid(std::int32_t id) const { return static_cast<std::uint32_t>(id) <= limit_; }  // negatives are huge

  bool all_valid(const std::int32_t* ids) const {
    bool all = true;
    for (int j = 0; j < kBlock; ++j) all &= valid(ids[j]);
    return all;
  }

  void prefetch(const std::int32_t* ids) const {
    for (int j = 0; j < kBlock; ++j) Places::prefetch(tags_, ages_, places_.home_of(ids[j]));
  }

  void look_up(std::int32_t first, Block& block) const {
    block.first = first;
    const std::int32_t* ids = ids_ + first;
    places_.locate(ids, block.homes);
    asm("" : "+r"(ids));
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC unroll 16
#endif
    for (int j = 0; j < kBlock; ++j) block.found[j] = Places::match(tags_, block.homes, j, ids[j]);
  }

  void settle(Block& block, Marked& marked) const {
    std::int32_t* slots = slots_ + block.first;
    const std::uint32_t* bases = Places::bases(block.homes, block.found);
    marked.pending = Lanes<16>::settle_block(block.first, bases, block.found, slots, marked.pending);
    std::uint8_t* needed = needed_;
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC unroll 16
#endif
    for (int j = 0; j < kBlock; ++j) needed[slots[j]] = 1;
  }

  void mark_each(std::int32_t begin, std::int32_t end, Marked& marked) const {
    for (std::int32_t i = begin; i < end; ++i) {
      slots_[i] = kNoSlot;
      if (!valid(ids_[i])) {
        ++marked.invalid;
        continue;
      }
      const typename Places::Home home = places_.home_of(ids_[i]);
      const std::uint32_t found = Places::match(tags_, home, ids_[i]);
      const int way = lowest(found | 0x80000000u);
      const auto base = static_cast<std::uint32_t>(Places::slot(home, way) - way);
      marked.pending = settle_position(i, base, found, slots_ + i, marked.pending);
      needed_[slots_[i]] = 1;
    }
  }

  const std::int32_t* const ids_;
  std::int32_t* const slots_;
  const std::int32_t* const tags_;
  const std::uint8_t* const ages_;
  std::uint8_t* const needed_;
  const Places places_;
  const std::uint32_t limit_;
  const bool fetched_;
};

template <class P, class Places>
class RequestPlan {
 public:
  RequestPlan(const RequestJob& job, const Scratch& scratch, PlanStats& stats)
      : job_(job), scratch_(scratch), stats_(stats), places_(job.sets), stable_(job.seq_len - job.query_tokens),
        next_partition_(job.next, std::int64_t{job.query_tokens} * job.width, job.expected_misses) {}

  void run() {
    drop_unstable();
    for (std::int32_t token = 0; token < job_.query_tokens; ++token) {
      job_.new_slots[token] = kNoSlot;
      mark_hits(token);
    }
    settle_hits();
    if (job_.kinds != nullptr) describe();
    displace(install_pending());
    next_partition_.finish();
    place_unchosen_new_tokens();
    *job_.miss_count = miss_count_;
    stats_.misses += miss_count_;
    clear_scratch();
  }

 private:
  using Home = typename Places::Home;
  static constexpr int kWays = Places::kWays;

  // I-2: rows written for drafts rejected since must not be found again.
  void drop_unstable() {
    const std::int32_t high = *job_.high;
    if (std::int64_t{high} - stable_ > slots()) {
      for (std::int64_t slot = 0; slot < slots(); ++slot) {
        if (job_.tags[slot] >= stable_) drop(slot);
      }
    } else {
      for (std::int32_t id = stable_; id < high; ++id) {
        const Home home = places_.home_of(id);
        const std::uint32_t found = Places::match(job_.tags, home, id);
        if (found != 0) drop(Places::slot(home, lowest(found)));
      }
    }
    *job_.high = job_.seq_len;
  }

  void drop(std::int64_t slot) {
    job_.tags[slot] = kEmpty;
    job_.ages[slot] = 0;
  }

  // I-3: all hits of the step are marked before any victim is chosen.
  void mark_hits(std::int32_t token) {
    const std::int32_t begin = token * job_.width;
    const Marker<Places> marker(job_, scratch_, stable_ + token);
    const Marked marked =
        marker.run(begin, begin + job_.width, {scratch_.pending + pending_count_, 0}, next_partition_);
    const auto pending = static_cast<std::int32_t>(marked.pending - scratch_.pending);
    hit_positions_ += job_.width - marked.invalid - (pending - pending_count_);
    pending_count_ = pending;
    stats_.invalid += marked.invalid;
  }

  // The policy learns of the hits slot by slot, once for each however many positions have it.
  void settle_hits() {
    const std::int64_t hits =
        dense() ? Lanes<16>::template settle_partition<P>(job_.ages, scratch_.needed, slots()) : settle_each();
    stats_.hits += hits;
    stats_.duplicates += hit_positions_ - hits;
  }

  bool dense() const { return slots() <= kDense * positions(); }
  std::int64_t slots() const { return std::int64_t{job_.sets} * Places::kSetWays; }
  std::int64_t positions() const { return std::int64_t{job_.query_tokens} * job_.width; }

  // Returns the hits. Marks those counted with a 2.
  std::int64_t settle_each() const {
    std::int64_t hits = 0;
    for (std::int64_t i = 0; i < positions(); ++i) {
      const std::int32_t slot = job_.slots[i];
      if (slot == kNoSlot || scratch_.needed[slot] != 1) continue;
      scratch_.needed[slot] = 2;
      if constexpr (kHitChangesAge<P>) job_.ages[slot] = age_after_hit<P>(job_.ages[slot]);
      ++hits;
    }
    return hits;
  }

  // Compact delivery: only hits have a slot so far, and only they are read from the pool.
  void describe() const {
    for (std::int32_t token = 0; token < job_.query_tokens; ++token) {
      const std::int32_t limit = stable_ + token;
      for (std::int32_t i = token * job_.width; i < (token + 1) * job_.width; ++i) {
        const std::int32_t id = job_.topk[i];
        std::int32_t kind = id < stable_ ? kOldMiss : kDecodeWindow;
        kind = id > limit ? kFutureSkip : kind;
        kind = id < 0 ? kNegativeStop : kind;
        const bool hit = job_.slots[i] != kNoSlot;
        job_.kinds[2 * i] = hit ? kPoolHit : kind;
        job_.kinds[2 * i + 1] = hit ? job_.slots[i] : id;
      }
    }
  }

  // Gives the pending positions ways of their own sets. Those that found theirs full become the
  // pending ones; returns their number.
  std::int32_t install_pending() {
    std::int32_t overflow = 0;
    for (std::int32_t i = 0; i < pending_count_; ++i) {
      next_partition_.advance();
      const std::int32_t at = scratch_.pending[i];
      const std::int32_t id = job_.topk[at];
      const Home home = places_.home_of(id);
      // Not resident when the hits were marked: found now means an earlier position of this step placed it.
      const std::uint32_t found = Places::match(job_.tags, home, id);
      if (found != 0) {
        job_.slots[at] = Places::slot(home, lowest(found));
        ++stats_.duplicates;
        continue;
      }
      const std::int32_t slot = take_slot(home);
      if (slot == kNoSlot) {
        scratch_.pending[overflow++] = at;
        continue;
      }
      install(slot, id);
      emit(at, id, slot);
    }
    return overflow;
  }

  void displace(std::int32_t overflow) {
    for (std::int32_t i = 0; i < overflow; ++i) {
      const std::int32_t at = scratch_.pending[i];
      const std::int32_t id = job_.topk[at];
      const std::int32_t slot = find_displaced(id);
      if (slot != kNoSlot) {
        job_.slots[at] = slot;
        ++stats_.duplicates;
      } else {
        emit(at, id, displace_id(id));
      }
    }
  }

  // The slot of an id's first position.
  void emit(std::int32_t at, std::int32_t id, std::int32_t slot) {
    job_.slots[at] = slot;
    if (id >= stable_) {
      job_.new_slots[id - stable_] = slot;
      ++stats_.new_tokens;
    } else {
      job_.miss_ids[miss_count_] = id;
      job_.miss_slots[miss_count_] = slot;
      if (job_.miss_positions != nullptr) job_.miss_positions[miss_count_] = at;
      ++miss_count_;
    }
  }

  void install(std::int32_t slot, std::int32_t id) {
    job_.tags[slot] = id;
    job_.ages[slot] = P::kNewAge;
  }

  // One of the ways at `home` that this step does not need, now marked as needed; kNoSlot when there is none.
  std::int32_t take_slot(Home home) {
    const std::uint32_t unneeded = Places::zero(scratch_.needed, home);
    if (unneeded == 0) return kNoSlot;
    const std::uint32_t empty = Places::match(job_.tags, home, kEmpty) & unneeded;
    const std::int32_t slot = Places::slot(home, empty != 0 ? Places::emptiest(empty) : victim(home, unneeded));
    scratch_.needed[slot] = 1;
    return slot;
  }

  int victim(Home home, std::uint32_t unneeded) {
    std::uint8_t& hand = job_.hands[Places::set_of(home)];
    PlaceAges<Places> ages(job_.ages, home);
    const int way = P::victim(ages, unneeded, hand & (kWays - 1));
    hand = static_cast<std::uint8_t>((way + 1) & (kWays - 1));
    return way;
  }

  // I-4: the id's own sets are full of ids that this step needs. Any other slot of the partition serves the step; left
  // untagged, it is forgotten afterwards.
  std::int32_t displace_id(std::int32_t id) {
    const auto sets = static_cast<std::uint32_t>(job_.sets);
    const std::uint32_t own = places_.set_of(id);
    std::int32_t slot = kNoSlot;
    for (std::uint32_t i = 1; i < sets && slot == kNoSlot; ++i) slot = take_slot(Places::near((own + i) & (sets - 1)));
    // plan.cpp refuses requests with more ids than slots, so one was found.
    drop(slot);
    remember_displaced(id, slot);
    ++stats_.displaced;
    return slot;
  }

  std::uint32_t displaced_home(std::int32_t id) const {
    return (static_cast<std::uint32_t>(id) * 2654435769u) >> (32 - scratch_.displaced_bits);
  }

  std::int32_t find_displaced(std::int32_t id) const {
    if (displaced_count_ == 0) return kNoSlot;
    const std::uint32_t last = (1u << scratch_.displaced_bits) - 1;
    for (std::uint32_t at = displaced_home(id);; at = (at + 1) & last) {
      if (scratch_.displaced_id[at] == id) return scratch_.displaced_slot[at];
      if (scratch_.displaced_id[at] == kEmpty) return kNoSlot;
    }
  }

  void remember_displaced(std::int32_t id, std::int32_t slot) {
    const std::uint32_t last = (1u << scratch_.displaced_bits) - 1;
    std::uint32_t at = displaced_home(id);
    while (scratch_.displaced_id[at] != kEmpty) at = (at + 1) & last;
    scratch_.displaced_id[at] = id;
    scratch_.displaced_slot[at] = slot;
    scratch_.displaced_used[displaced_count_++] = static_cast<std::int32_t>(at);
  }

  // The next step is likely to choose this step's tokens, so they stay where this costs the step nothing.
  void place_unchosen_new_tokens() {
    for (std::int32_t token = 0; token < job_.query_tokens; ++token) {
      if (job_.new_slots[token] != kNoSlot) continue;
      const std::int32_t id = stable_ + token;
      const std::int32_t slot = take_slot(places_.home_of(id));
      if (slot == kNoSlot) continue;
      install(slot, id);
      job_.new_slots[token] = slot;
      ++stats_.new_tokens;
    }
  }

  void clear_scratch() {
    if (dense()) {
      for (std::int64_t slot = 0; slot < slots(); ++slot) scratch_.needed[slot] = 0;
    } else {  // every needed slot is in the output
      for (std::int64_t i = 0; i < positions(); ++i) scratch_.needed[job_.slots[i]] = 0;
      for (std::int32_t token = 0; token < job_.query_tokens; ++token) scratch_.needed[job_.new_slots[token]] = 0;
    }
    for (std::int32_t i = 0; i < displaced_count_; ++i) scratch_.displaced_id[scratch_.displaced_used[i]] = kEmpty;
  }

  const RequestJob job_;
  const Scratch scratch_;
  PlanStats& stats_;
  const Places places_;
  const std::int32_t stable_;
  NextPartition next_partition_;
  std::int32_t pending_count_ = 0;
  std::int32_t displaced_count_ = 0;
  std::int32_t miss_count_ = 0;
  std::int64_t hit_positions_ = 0;
};

template <class P, class Places>
void plan_request(const RequestJob& job, const Scratch& scratch, PlanStats& stats) {
  RequestPlan<P, Places>(job, scratch, stats).run();
}

template <class P>
PlanRequestFn planner_of(Placement placement, int ways) {
  if (placement == Placement::kTwoSets) return ways == 16 ? plan_request<P, TwoSets<16>> : plan_request<P, TwoSets<32>>;
  return ways == 16 ? plan_request<P, OneSet<16>> : plan_request<P, OneSet<32>>;
}

PlanRequestFn planner(Policy policy, Placement placement, int ways) {
  switch (policy) {
#define KVOFFLOAD_POLICY(name, Struct) \
  case Policy::k##Struct: return planner_of<Struct>(placement, ways);
    KVOFFLOAD_POLICIES(KVOFFLOAD_POLICY)
#undef KVOFFLOAD_POLICY
  }
  return nullptr;
}

}  // namespace
}  // namespace kvoffload
