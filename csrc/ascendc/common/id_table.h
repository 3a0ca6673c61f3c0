// A hash table from token ids to small numbers, in the unified buffer. Open addressing; scalar.
#pragma once

#include "kernel_operator.h"
#include "tiling_data.h"

namespace kvoffload::ascendc {

// An entry holds 1 + the index of an id in a list that the caller keeps; 0: free. More entries than ids.
class IdTable {
 public:
  __aicore__ inline void init(AscendC::TPipe& pipe, int32_t bits) {
    bits_ = bits;
    pipe.InitBuffer(buffer_, 2 << bits);
    entries_ = buffer_.Get<uint16_t>();
  }

  // The caller orders it after the look-ups of the last use (S_V) and before those of the next (V_S).
  __aicore__ inline void clear() { AscendC::Duplicate(buffer_.Get<int32_t>(), 0, (2 << bits_) / 4); }

  // Position of `id`, or its insertion position: entry() distinguishes the two.
  template <typename Ids>
  __aicore__ inline uint32_t find(const Ids& ids, int32_t id) const {
    uint32_t at = (static_cast<uint32_t>(id) * 2654435769u) >> (32 - bits_);
    for (uint16_t entry = entries_.GetValue(at); entry != 0; entry = entries_.GetValue(at)) {
      if (ids.GetValue(entry - 1) == id) break;
      at = (at + 1) & ((1u << bits_) - 1);
    }
    return at;
  }

  // Index of the id found there, -1 when none.
  __aicore__ inline int32_t entry(uint32_t at) const { return static_cast<int32_t>(entries_.GetValue(at)) - 1; }
  __aicore__ inline void set(uint32_t at, int32_t index) { entries_.SetValue(at, static_cast<uint16_t>(index + 1)); }

 private:
  int32_t bits_ = 0;
  AscendC::TBuf<AscendC::TPosition::VECCALC> buffer_;
  AscendC::LocalTensor<uint16_t> entries_;
};

}  // namespace kvoffload::ascendc
