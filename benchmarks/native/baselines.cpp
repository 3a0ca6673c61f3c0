// Baselines for the ops, as a plain C library: a straightforward exact LRU, and memcpy.
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

// Per-step marks of the ids that a query chose: one array over the whole context, made valid by an epoch.
struct Marks {
  std::vector<std::int32_t> epoch_of, position_of;
  std::int32_t epoch = 0;
};

struct Row {
  std::int32_t* token_of_slot;  // [slots], -1: empty
  std::int32_t* order;          // [slots], slots from least to most recently used
};

}  // namespace

struct ExactLru {
  std::int64_t slots, width;
  std::vector<std::int32_t> token_of_slot, order, hits, others;
  Marks marks;
};

namespace {

// One query: walks the row's slots from the oldest, so hits are found and victims ordered in one scan.
std::int32_t plan_row(ExactLru& lru, Row row, const std::int32_t* ids, std::int32_t stable, std::int32_t* current,
                      std::int32_t* miss_ids, std::int32_t* miss_slots) {
  const auto context = static_cast<std::int32_t>(lru.marks.epoch_of.size());
  const std::int32_t epoch = ++lru.marks.epoch;
  for (std::int64_t k = 0; k < lru.width; ++k) {
    current[k] = -1;
    const std::int32_t id = ids[k];
    if (id < 0 || id >= context || lru.marks.epoch_of[static_cast<std::size_t>(id)] == epoch) continue;
    lru.marks.epoch_of[static_cast<std::size_t>(id)] = epoch;
    lru.marks.position_of[static_cast<std::size_t>(id)] = static_cast<std::int32_t>(k);
  }
  std::int64_t hits = 0, others = 0;
  for (std::int64_t i = 0; i < lru.slots; ++i) {
    const std::int32_t slot = row.order[i];
    std::int32_t token = row.token_of_slot[slot];
    if (token >= stable) token = row.token_of_slot[slot] = -1;
    if (token >= 0 && lru.marks.epoch_of[static_cast<std::size_t>(token)] == epoch) {
      current[lru.marks.position_of[static_cast<std::size_t>(token)]] = slot;
      lru.hits[static_cast<std::size_t>(hits++)] = slot;
    } else {
      lru.others[static_cast<std::size_t>(others++)] = slot;
    }
  }
  std::int32_t misses = 0;
  for (std::int64_t k = 0; k < lru.width; ++k) {
    if (ids[k] < 0 || ids[k] >= context || current[k] >= 0) continue;
    const std::int32_t slot = lru.others[static_cast<std::size_t>(misses)];
    row.token_of_slot[slot] = ids[k];
    current[k] = slot;
    miss_ids[misses] = ids[k];
    miss_slots[misses++] = slot;
  }
  std::int32_t* order = row.order;
  for (std::int64_t i = misses; i < others; ++i) *order++ = lru.others[static_cast<std::size_t>(i)];
  for (std::int64_t i = 0; i < misses; ++i) *order++ = lru.others[static_cast<std::size_t>(i)];
  for (std::int64_t i = 0; i < hits; ++i) *order++ = lru.hits[static_cast<std::size_t>(i)];
  return misses;
}

}  // namespace

extern "C" {

ExactLru* exact_lru_create(std::int64_t rows, std::int64_t slots, std::int64_t width, std::int64_t context) {
  auto* lru = new ExactLru{slots, width, {}, {}, {}, {}, {}};
  lru->token_of_slot.assign(static_cast<std::size_t>(rows * slots), -1);
  lru->order.resize(static_cast<std::size_t>(rows * slots));
  for (std::int64_t i = 0; i < rows * slots; ++i) {
    lru->order[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(i % slots);
  }
  lru->hits.resize(static_cast<std::size_t>(slots));
  lru->others.resize(static_cast<std::size_t>(slots));
  lru->marks.epoch_of.assign(static_cast<std::size_t>(context), 0);
  lru->marks.position_of.assign(static_cast<std::size_t>(context), 0);
  return lru;
}

void exact_lru_destroy(ExactLru* lru) { delete lru; }

// topk, current, miss_ids, miss_slots [rows, width]; stable, miss_counts [rows].
void exact_lru_plan(ExactLru* lru, std::int64_t rows, const std::int32_t* topk, const std::int32_t* stable,
                    std::int32_t* current, std::int32_t* miss_ids, std::int32_t* miss_slots,
                    std::int32_t* miss_counts) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const Row row{lru->token_of_slot.data() + r * lru->slots, lru->order.data() + r * lru->slots};
    const std::int64_t at = r * lru->width;
    miss_counts[r] = plan_row(*lru, row, topk + at, stable[r], current + at, miss_ids + at, miss_slots + at);
  }
}

void copy_rows(const std::uint64_t* from, const std::uint64_t* to, std::int64_t count, std::int64_t bytes) {
  for (std::int64_t i = 0; i < count; ++i) {
    std::memcpy(reinterpret_cast<void*>(to[i]), reinterpret_cast<const void*>(from[i]),
                static_cast<std::size_t>(bytes));
  }
}

}  // extern "C"
