// Partitions, lengths and query starts of all requests of a call, in the unified buffer.
#pragma once

#include "../../common/staged_ints.h"
#include "plan_values.h"

namespace kvoffload::ascendc {

class PlanRequests {
 public:
  __aicore__ inline void init(AscendC::TPipe& pipe, const PlanArguments& args, const PlanTiling& tiling) {
    tiling_ = tiling;
    rows_.init(pipe, args.rows, tiling.requests);
    seq_lens_.init(pipe, args.seq_lens, tiling.requests);
    starts_.init(pipe, args.query_start_loc, tiling.requests + 1);
    rows_.fetch(0, tiling.requests);
    seq_lens_.fetch(0, tiling.requests);
    starts_.fetch(0, tiling.requests + 1);
    KVOFFLOAD_ORDER(MTE2_S);
  }

  __aicore__ inline int32_t row(int32_t n) const { return rows_[n]; }
  __aicore__ inline int32_t seq_len(int32_t n) const { return seq_lens_[n]; }
  __aicore__ inline int32_t first_token(int32_t n) const { return starts_[n]; }
  __aicore__ inline int32_t end_token(int32_t n) const { return starts_[n + 1]; }
  __aicore__ inline int32_t query(int32_t n) const { return starts_[n + 1] - starts_[n]; }

  // Whether request n gets a plan: it has a partition and tokens, and is none that the host should have refused.
  __aicore__ inline bool planned(int32_t n) const {
    const int32_t q = query(n);
    return rows_[n] >= 0 && rows_[n] < tiling_.rows && q > 0 && q <= tiling_.max_query && seq_lens_[n] >= q &&
           starts_[n + 1] <= tiling_.tokens;
  }

 private:
  PlanTiling tiling_;
  StagedInts rows_;
  StagedInts seq_lens_;
  StagedInts starts_;
};

}  // namespace kvoffload::ascendc
