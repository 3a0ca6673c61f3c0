// Helpers shared by the tilings. Plain host C++: no CANN, no torch.
#pragma once

#include <cstdint>
#include <string>

#include "tiling_data.h"

namespace kvoffload::ascendc {

inline constexpr int64_t kUbBytes = 192 * 1024 - 256;  // Atlas A2 and A3; the end is CANN's own
inline constexpr int64_t kMaxCores = 64;         // a device has 40 to 50 vector cores
inline constexpr int64_t kMaxRowBytes = 8 * 1024;
inline constexpr int64_t kMaxBatchRows = 32;
inline constexpr int64_t kInt32Max = INT32_MAX;

// A tiling, or why there is none.
template <typename Data>
struct Tiled {
  Data data{};
  std::string refusal;  // empty: data is valid

  bool ok() const { return refusal.empty(); }
};

constexpr int64_t align_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
constexpr bool is_power_of_two(int64_t value) { return value > 0 && (value & (value - 1)) == 0; }

constexpr int32_t log2_of(int64_t power) {
  int32_t bits = 0;
  while ((int64_t{1} << bits) < power) ++bits;
  return bits;
}

// Bytes of `count` int32 in the unified buffer.
constexpr int64_t ub_ints(int64_t count) { return align_up(count * 4, kUbBlockBytes); }

// Keeps the first refusal; later ones would only repeat it.
class Checker {
 public:
  explicit Checker(std::string& refusal) : refusal_(refusal) {}

  bool require(bool condition, const std::string& message) {
    if (!condition && refusal_.empty()) refusal_ = message;
    return refusal_.empty();
  }

  bool between(const std::string& name, int64_t value, int64_t least, int64_t most) {
    return require(value >= least && value <= most, name + ": must be " + std::to_string(least) + " to " +
                                                        std::to_string(most) + ", got " + std::to_string(value));
  }

  bool multiple(const std::string& name, int64_t value, int64_t unit) {
    return require(value % unit == 0,
                   name + ": must be a multiple of " + std::to_string(unit) + ", got " + std::to_string(value));
  }

 private:
  std::string& refusal_;
};

// The least power of two of consecutive rows that end where a line ends.
inline int32_t rows_per_line_group(const RowsTiling& rows) {
  int32_t group = 1;
  while (group * rows.bytes[0] % kLineBytes != 0 || group * rows.bytes[1] % kLineBytes != 0) group *= 2;
  return group;
}

// Sizes the staging buffers. `reserved` bytes of the unified buffer serve other purposes; `zeros`: a row of zeros is
// kept as well.
inline void tile_rows(Checker& check, int64_t bytes0, int64_t bytes1, int64_t reserved, bool zeros,
                      RowsTiling& rows) {
  const int64_t bytes[kComponents] = {bytes0, bytes1};
  int64_t pitch = 0;
  for (int i = 0; i < kComponents; ++i) {
    const std::string name = "row_bytes[" + std::to_string(i) + "]";
    check.between(name, bytes[i], i == 0 ? 16 : 0, kMaxRowBytes);
    check.multiple(name, bytes[i], 16);
    rows.bytes[i] = static_cast<int32_t>(bytes[i]);
    rows.pitch[i] = static_cast<int32_t>(align_up(bytes[i], kUbBlockBytes));
    pitch += rows.pitch[i];
  }
  const int64_t room = kUbBytes - reserved - (zeros ? pitch : 0);
  const int64_t fits = pitch > 0 ? room / (2 * pitch) : 0;
  check.require(fits >= 1, "unified buffer: " + std::to_string(reserved) + " bytes of tables leave no room for two "
                               "rows of " + std::to_string(pitch) + " bytes; use fewer requests per call or a "
                               "narrower block table");
  rows.batch_rows = static_cast<int32_t>(fits < kMaxBatchRows ? fits : kMaxBatchRows);
  rows.buffer_bytes = static_cast<int32_t>(rows.batch_rows * pitch);
}

inline void tile_host(Checker& check, int64_t blocks, int64_t block_size, int64_t table_width, HostTiling& host) {
  check.between("host blocks", blocks, 1, kInt32Max);
  check.between("block_size", block_size, 1, kInt32Max);
  check.between("block table width", table_width, 1, kInt32Max);
  check.require(blocks * block_size <= kInt32Max, "host: must have less than 2^31 tokens");
  host = {static_cast<int32_t>(blocks), static_cast<int32_t>(block_size), static_cast<int32_t>(table_width),
          is_power_of_two(block_size) ? log2_of(block_size) : -1};
}

// Whether a request's rows must stay with one core, because neighbours share lines.
inline int32_t needs_one_core(Checker& check, const RowsTiling& rows, int64_t slots) {
  for (const int64_t bytes : rows.bytes) {
    check.require(slots * bytes % kLineBytes == 0,
                  "pool: partitions of " + std::to_string(slots) + " slots of " + std::to_string(bytes) +
                      " bytes must begin on a line of " + std::to_string(kLineBytes) + " bytes");
  }
  return rows.bytes[0] % kLineBytes != 0 || rows.bytes[1] % kLineBytes != 0 ? 1 : 0;
}

// Slots of the destination pool are numbered with an int32.
inline void check_pool(Checker& check, int64_t rows, int64_t slots) {
  check.between("pool partitions", rows, 1, kInt32Max);
  check.between("slots per partition", slots, 1, kInt32Max);
  check.require(slots < 1 || rows <= kInt32Max / slots, "pool: must have less than 2^31 slots in all");
}

}  // namespace kvoffload::ascendc
