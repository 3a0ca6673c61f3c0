#include "copies.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "checks.h"
#include "row_copies.h"

namespace kvoffload {
namespace {

void collect_request(const HostPoolView& host, const HotPoolView& hot, const MissView& misses, std::int64_t n,
                     std::vector<Copy>& copies) {
  const std::int64_t count = misses.counts[n];
  require(misses.rows[n] < hot.partitions, "rows[", n, "]: ", misses.rows[n], " is outside the hot pool's ",
          hot.partitions, " partitions");
  require(count >= 0 && count <= misses.capacity, "miss_counts[", n, "]: ", count, " is outside 0..",
          misses.capacity);
  const std::int32_t* ids = misses.ids + n * misses.capacity;
  const std::int32_t* slots = misses.slots + n * misses.capacity;
  const std::int32_t* table = misses.block_table + n * misses.table_width;
  std::uint8_t* partition = hot.data + misses.rows[n] * hot.slots * hot.row_bytes;
  for (std::int64_t i = 0; i < count; ++i) {
    require(ids[i] >= 0, "miss_ids[", n, ", ", i, "]: negative id ", ids[i]);
    require(slots[i] >= 0 && slots[i] < hot.slots, "miss_slots[", n, ", ", i, "]: ", slots[i], " is outside the ",
            hot.slots, " slots of a partition");
    copies.push_back({host_row(host, table, misses.table_width, ids[i], n), partition + slots[i] * hot.row_bytes});
  }
}

void check_ranges(const char* name, const RangesView& ranges) {
  std::int64_t last = 0;
  for (std::int64_t i = 0; i < ranges.count; ++i) {
    const std::int64_t start = ranges.bounds[2 * i];
    const std::int64_t end = ranges.bounds[2 * i + 1];
    require(start >= last && end >= start, name, "[", i, "]: ", start, "..", end,
            " is reversed, negative, or not behind the one before");
    last = end;
  }
}

// Ranges may touch, but a span must not cross from one to the next: they belong to different objects.
bool inside(const RangesView& ranges, std::int64_t address, std::int64_t nbytes) {
  std::int64_t low = 0;
  std::int64_t high = ranges.count;
  while (low < high) {  // the first range that starts behind the address
    const std::int64_t middle = low + (high - low) / 2;
    if (ranges.bounds[2 * middle] > address) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  if (low == 0) return false;
  const std::int64_t end = ranges.bounds[2 * low - 1];
  return address < end && nbytes <= end - address;  // no sum: that could overflow
}

}  // namespace

std::int64_t copy_spans(const SpansView& spans, const RangesView& to_ranges, const RangesView& from_ranges) {
  check_ranges("to_ranges", to_ranges);
  check_ranges("source_ranges", from_ranges);
  std::int64_t total = 0;
  for (std::int64_t i = 0; i < spans.count; ++i) {
    const std::int64_t bytes = spans.nbytes[i];
    require(bytes > 0, "nbytes[", i, "]: ", bytes, " is not above 0");
    require(inside(to_ranges, spans.to[i], bytes), "to[", i, "]: ", spans.to[i], "+", bytes,
            " lies in none of the ", to_ranges.count, " ranges");
    require(inside(from_ranges, spans.from[i], bytes), "source[", i, "]: ", spans.from[i], "+", bytes,
            " lies in none of the ", from_ranges.count, " ranges");
    const std::int64_t gap = spans.to[i] > spans.from[i] ? spans.to[i] - spans.from[i] : spans.from[i] - spans.to[i];
    require(gap >= bytes, "to[", i, "]: ", spans.to[i], "+", bytes, " overlaps its source");
    require(!__builtin_add_overflow(total, bytes, &total), "nbytes: their sum is beyond 64 bits");
  }
  for (std::int64_t i = 0; i < spans.count; ++i) {
    std::memcpy(reinterpret_cast<void*>(spans.to[i]), reinterpret_cast<const void*>(spans.from[i]),
                static_cast<std::size_t>(spans.nbytes[i]));
  }
  return total;
}

std::int64_t dsa_serve(const HostPoolView& host, const HotPoolView& hot, const MissView& misses) {
  require(host.row_bytes == hot.row_bytes, "hot: row of ", hot.row_bytes, " bytes, but the host pool's has ",
          host.row_bytes);
  require(host.block_size > 0, "host: blocks of no tokens");
  thread_local std::vector<Copy> copies;  // kept: one call per layer and step
  copies.clear();
  for (std::int64_t n = 0; n < misses.requests; ++n) {
    if (misses.rows[n] >= 0) collect_request(host, hot, misses, n, copies);
  }
  copy_all(copies, host.row_bytes);
  return static_cast<std::int64_t>(copies.size()) * host.row_bytes;
}

void write_rows(const HotPoolView& hot, const std::int32_t* rows, const std::uint8_t* new_rows,
                const std::int32_t* slots, std::int64_t tokens) {
  for (std::int64_t t = 0; t < tokens; ++t) {
    require(slots[t] >= -1 && slots[t] < hot.slots, "slots[", t, "]: ", slots[t], " is outside -1..", hot.slots - 1);
    require(slots[t] < 0 || (rows[t] >= 0 && rows[t] < hot.partitions), "rows[", t, "]: ", rows[t],
            " is outside the hot pool's ", hot.partitions, " partitions");
  }
  for (std::int64_t t = 0; t < tokens; ++t) {
    if (slots[t] < 0) continue;
    const std::int64_t slot = rows[t] * hot.slots + slots[t];
    std::memcpy(hot.data + slot * hot.row_bytes, new_rows + t * hot.row_bytes,
                static_cast<std::size_t>(hot.row_bytes));
  }
}

void host_write(const HostPoolView& host, const std::uint8_t* new_rows, const std::int64_t* slot_mapping,
                std::int64_t tokens) {
  const std::int64_t capacity = host.blocks * host.block_size;
  for (std::int64_t t = 0; t < tokens; ++t) {
    require(slot_mapping[t] >= -1 && slot_mapping[t] < capacity, "slot_mapping[", t, "]: ", slot_mapping[t],
            " is outside -1..", capacity - 1);
  }
  for (std::int64_t t = 0; t < tokens; ++t) {
    if (slot_mapping[t] < 0) continue;
    std::memcpy(host.data + slot_mapping[t] * host.row_bytes, new_rows + t * host.row_bytes,
                static_cast<std::size_t>(host.row_bytes));
  }
}

void host_read(const HostPoolView& host, const std::int32_t* block_table, std::int64_t table_width,
               std::int64_t start, std::int64_t count, std::uint8_t* dst) {
  require(host.block_size > 0, "host: blocks of no tokens");
  const std::int64_t tokens = table_width * host.block_size;
  require(start >= 0 && start <= tokens, "start: ", start, " is outside the block table's ", tokens, " tokens");
  require(count >= 0 && count <= tokens - start, "count: ", count, " tokens from ", start,
          " are outside the block table's ", tokens);
  const std::int64_t end = start + count;
  for (std::int64_t index = start / host.block_size; index * host.block_size < end; ++index) {
    checked_block(host, block_table, table_width, index, 0);
  }
  for (std::int64_t token = start; token < end;) {
    const std::int64_t offset = token % host.block_size;
    const std::int64_t run = std::min(host.block_size - offset, end - token);
    const std::int64_t from = block_table[token / host.block_size] * host.block_size + offset;
    std::memcpy(dst, host.data + from * host.row_bytes, static_cast<std::size_t>(run * host.row_bytes));
    dst += run * host.row_bytes;
    token += run;
  }
}

}  // namespace kvoffload
