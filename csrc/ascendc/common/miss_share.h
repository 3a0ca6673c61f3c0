// The share of the requests' misses that a core copies.
#pragma once

#include "staged_ints.h"

namespace kvoffload::ascendc {

// All misses of a call, numbered over the requests, dealt out in equal shares; or request by request.
class MissShare {
 public:
  __aicore__ inline MissShare(const StagedInts& rows, const StagedInts& counts, int32_t requests, int32_t capacity,
                              bool by_request)
      : rows_(rows), counts_(counts), capacity_(capacity), by_request_(by_request) {
    int64_t total = 0;
    for (int32_t n = 0; n < requests; ++n) total += count(n);
    begin_ = total * AscendC::GetBlockIdx() / AscendC::GetBlockNum();
    end_ = total * (AscendC::GetBlockIdx() + 1) / AscendC::GetBlockNum();
  }

  // Misses of request n; none without a partition. Counts beyond the buffer are cut.
  __aicore__ inline int32_t count(int32_t n) const {
    if (rows_[n] < 0 || counts_[n] < 0) return 0;
    return counts_[n] < capacity_ ? counts_[n] : capacity_;
  }

  // To be called for n = 0, 1, ... in turn: the range of n's misses that this core moves.
  __aicore__ inline void next(int32_t n, int32_t& first, int32_t& last) {
    const int32_t misses = count(n);
    if (by_request_) {
      first = 0;
      last = n % AscendC::GetBlockNum() == AscendC::GetBlockIdx() ? misses : 0;
      return;
    }
    first = static_cast<int32_t>(begin_ > passed_ ? (begin_ < passed_ + misses ? begin_ - passed_ : misses) : 0);
    last = static_cast<int32_t>(end_ < passed_ + misses ? (end_ > passed_ ? end_ - passed_ : 0) : misses);
    passed_ += misses;
  }

 private:
  const StagedInts& rows_;
  const StagedInts& counts_;
  const int32_t capacity_;
  const bool by_request_;
  int64_t begin_ = 0;
  int64_t end_ = 0;
  int64_t passed_ = 0;
};

}  // namespace kvoffload::ascendc
