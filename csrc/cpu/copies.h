// Row copies between the host pool, the hot pool and freshly computed rows. All offsets are 64-bit (I-5); every
// argument is checked before the first byte moves, and std::invalid_argument names the offender.
#pragma once

#include <cstdint>

namespace kvoffload {

struct HostPoolView {
  std::uint8_t* data;  // [blocks, block_size, row_bytes]
  std::int64_t blocks;
  std::int64_t block_size;
  std::int64_t row_bytes;
};

struct HotPoolView {
  std::uint8_t* data;  // [partitions, slots, row_bytes]
  std::int64_t partitions;
  std::int64_t slots;
  std::int64_t row_bytes;
};

struct MissView {
  const std::int32_t* block_table;  // [requests, table_width]
  const std::int32_t* rows;         // [requests], negative: skip
  const std::int32_t* ids;          // [requests, capacity]
  const std::int32_t* slots;        // [requests, capacity]
  const std::int32_t* counts;       // [requests]
  std::int64_t requests;
  std::int64_t table_width;
  std::int64_t capacity;
};

// Fetches every miss into its slot; returns the bytes copied.
std::int64_t dsa_serve(const HostPoolView& host, const HotPoolView& hot, const MissView& misses);

// new_rows [tokens, row_bytes] into slot slots[t] of partition rows[t]; slot -1: skip.
void write_rows(const HotPoolView& hot, const std::int32_t* rows, const std::uint8_t* new_rows,
                const std::int32_t* slots, std::int64_t tokens);

// new_rows [tokens, row_bytes] to host slot slot_mapping[t] = block * block_size + offset; -1: skip.
void host_write(const HostPoolView& host, const std::uint8_t* new_rows, const std::int64_t* slot_mapping,
                std::int64_t tokens);

// Tokens start..start+count of one request to the first `count` rows of dst, block by block.
void host_read(const HostPoolView& host, const std::int32_t* block_table, std::int64_t table_width,
               std::int64_t start, std::int64_t count, std::uint8_t* dst);

// Sorted, not overlapping [start, end) of memory that may be touched.
struct RangesView {
  const std::int64_t* bounds;  // [count, 2]
  std::int64_t count;
};

struct SpansView {
  const std::int64_t* to;      // [count], addresses
  const std::int64_t* from;    // [count], addresses
  const std::int64_t* nbytes;  // [count]
  std::int64_t count;
};

// Copies every span, in order, once each is known to lie in one range of either side; returns the bytes copied.
// Source and destination of one span must not overlap.
std::int64_t copy_spans(const SpansView& spans, const RangesView& to_ranges, const RangesView& from_ranges);

}  // namespace kvoffload
