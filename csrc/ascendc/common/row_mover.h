// Moves rows from places of some sources to places of one destination, through two staging buffers.
#pragma once

#include "copy.h"
#include "order.h"
#include "tiling_data.h"

namespace kvoffload::ascendc {

constexpr int32_t kNoSource = -1;  // a row of zeros

// The rows of one tensor, by component.
struct RowSet {
  AscendC::GlobalTensor<uint8_t> data[kComponents];

  __aicore__ inline void init(GM_ADDR component0, GM_ADDR component1) {
    data[0].SetGlobalBuffer(component0);
    data[1].SetGlobalBuffer(component1);
  }
};

template <int kSources>
class RowMover {
 public:
  // `entries`: the most rows of one list.
  __aicore__ inline void init(AscendC::TPipe& pipe, const RowsTiling& rows, int32_t entries) {
    rows_ = rows;
    pipe.InitBuffer(staging_, 2, rows.buffer_bytes);
    pipe.InitBuffer(from_buffer_, entries * 4);
    pipe.InitBuffer(to_buffer_, entries * 4);
    pipe.InitBuffer(source_buffer_, entries * 4);
    from_ = from_buffer_.Get<int32_t>();
    to_ = to_buffer_.Get<int32_t>();
    source_ = source_buffer_.Get<int32_t>();
  }

  // For lists with rows of zeros.
  __aicore__ inline void init_zeros(AscendC::TPipe& pipe) {
    const int32_t bytes = rows_.pitch[0] + rows_.pitch[1];
    pipe.InitBuffer(zeros_buffer_, bytes);
    AscendC::LocalTensor<int32_t> zeros = zeros_buffer_.Get<int32_t>();
    AscendC::Duplicate(zeros, 0, bytes / 4);
    KVOFFLOAD_ORDER(V_MTE3);
  }

  __aicore__ inline RowSet& source(int index) { return sources_[index]; }
  __aicore__ inline RowSet& destination() { return destination_; }

  __aicore__ inline void set(int32_t entry, int32_t source, int32_t from, int32_t to) {
    source_.SetValue(entry, source);
    from_.SetValue(entry, from);
    to_.SetValue(entry, to);
  }

  // Moves the first `count` rows of the list. While one batch is written the next is read.
  __aicore__ inline void move(int32_t count) {
    int32_t last = 0;
    for (int32_t first = 0; first < count; first += rows_.batch_rows) {
      read(first, limit(first, count));
      if (first > 0) write(last, first);
      last = first;
    }
    if (count > 0) write(last, count);
  }

 private:
  __aicore__ inline int32_t limit(int32_t first, int32_t count) const {
    return first + rows_.batch_rows < count ? first + rows_.batch_rows : count;
  }

  // End of the run of neighbours starting at `entry`: same source, and consecutive places in `places`.
  __aicore__ inline int32_t run_end(const AscendC::LocalTensor<int32_t>& places, int32_t entry, int32_t end) const {
    const int32_t source = source_.GetValue(entry);
    const int32_t place = places.GetValue(entry);
    int32_t next = entry + 1;
    while (next < end && source_.GetValue(next) == source && places.GetValue(next) == place + next - entry) ++next;
    return next;
  }

  __aicore__ inline void read(int32_t first, int32_t end) {
    AscendC::LocalTensor<uint8_t> buffer = staging_.template AllocTensor<uint8_t>();
    for (int32_t entry = first; entry < end;) {
      const int32_t source = source_.GetValue(entry);
      const int32_t next = source == kNoSource ? entry + 1 : run_end(from_, entry, end);
      if (source != kNoSource) read_run(buffer, source, entry - first, from_.GetValue(entry), next - entry);
      entry = next;
    }
    staging_.EnQue(buffer);
  }

  __aicore__ inline void read_run(const AscendC::LocalTensor<uint8_t>& buffer, int32_t source, int32_t at,
                                  int32_t from, int32_t count) {
    uint32_t base = 0;
    for (int32_t c = 0; c < kComponents; ++c) {
      if (rows_.bytes[c] != 0) {
        load_blocks(buffer[base + at * rows_.pitch[c]], sources_[source].data[c],
                    static_cast<uint64_t>(from) * rows_.bytes[c], static_cast<uint16_t>(count), rows_.bytes[c]);
      }
      base += rows_.batch_rows * rows_.pitch[c];
    }
  }

  __aicore__ inline void write(int32_t first, int32_t end) {
    AscendC::LocalTensor<uint8_t> buffer = staging_.template DeQue<uint8_t>();
    for (int32_t entry = first; entry < end;) {
      const int32_t to = to_.GetValue(entry);
      if (source_.GetValue(entry) == kNoSource) {
        write_zeros(to);
        ++entry;
        continue;
      }
      const int32_t next = written_run_end(entry, end);
      write_run(buffer, entry - first, to, next - entry);
      entry = next;
    }
    staging_.FreeTensor(buffer);
  }

  // Like run_end, but for any sources: the rows are in the buffer now.
  __aicore__ inline int32_t written_run_end(int32_t entry, int32_t end) const {
    const int32_t place = to_.GetValue(entry);
    int32_t next = entry + 1;
    while (next < end && source_.GetValue(next) != kNoSource && to_.GetValue(next) == place + next - entry) ++next;
    return next;
  }

  __aicore__ inline void write_run(const AscendC::LocalTensor<uint8_t>& buffer, int32_t at, int32_t to,
                                   int32_t count) {
    uint32_t base = 0;
    for (int32_t c = 0; c < kComponents; ++c) {
      if (rows_.bytes[c] != 0) {
        store_blocks(destination_.data[c], static_cast<uint64_t>(to) * rows_.bytes[c],
                     buffer[base + at * rows_.pitch[c]], static_cast<uint16_t>(count), rows_.bytes[c]);
      }
      base += rows_.batch_rows * rows_.pitch[c];
    }
  }

  __aicore__ inline void write_zeros(int32_t to) {
    AscendC::LocalTensor<uint8_t> zeros = zeros_buffer_.Get<uint8_t>();
    for (int32_t c = 0; c < kComponents; ++c) {
      if (rows_.bytes[c] == 0) continue;
      store_blocks(destination_.data[c], static_cast<uint64_t>(to) * rows_.bytes[c], zeros, 1, rows_.bytes[c]);
    }
  }

  AscendC::TQueBind<AscendC::TPosition::VECIN, AscendC::TPosition::VECOUT, 2> staging_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> from_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> to_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> source_buffer_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> zeros_buffer_;
  AscendC::LocalTensor<int32_t> from_;
  AscendC::LocalTensor<int32_t> to_;
  AscendC::LocalTensor<int32_t> source_;
  RowSet sources_[kSources];
  RowSet destination_;
  RowsTiling rows_;
};

}  // namespace kvoffload::ascendc
