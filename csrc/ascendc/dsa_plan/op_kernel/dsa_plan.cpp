// dsa_plan: the slots of each request's top-k ids in its partition of the hot pools, and the ids to fetch. Three phases
// with all cores in step between them: parts of partitions, partitions, totals. Arguments: see PlanArguments.
#include "kernel_operator.h"

#include "plan_rows.h"
#include "plan_sets.h"
#include "plan_totals.h"

namespace kvoffload::ascendc {

template <class P>
__aicore__ inline void plan_by(const PlanArguments& args, const PlanTiling& tiling) {
  AscendC::TPipe pipe;
  {
    PlanSets<P> sets;
    sets.init(pipe, args, tiling);
    sets.run();
  }
  AscendC::SyncAll();
  pipe.Reset();
  {
    PlanRows<P> rows;
    rows.init(pipe, args, tiling);
    rows.run();
  }
  AscendC::SyncAll();
  if (AscendC::GetBlockIdx() != 0) return;
  pipe.Reset();
  PlanTotals totals;
  totals.init(pipe, args, tiling);
  totals.run();
}

__aicore__ inline void dsa_plan(const PlanArguments& args, const PlanTiling& tiling) {
  switch (static_cast<Policy>(tiling.policy)) {
#define KVOFFLOAD_POLICY(name, Struct) \
  case Policy::k##Struct: return plan_by<Struct>(args, tiling);
    KVOFFLOAD_POLICIES(KVOFFLOAD_POLICY)
#undef KVOFFLOAD_POLICY
  }
}

}  // namespace kvoffload::ascendc

// Batch scheduling: the kernel starts only when all its cores are free. Otherwise another stream's kernel could hold some
// of them while the others wait for them in SyncAll.
extern "C" __schedmode__(1) __global__ __aicore__ void kvoffload_dsa_plan(
    GM_ADDR topk, GM_ADDR query_start_loc, GM_ADDR seq_lens, GM_ADDR rows, GM_ADDR tags, GM_ADDR ages, GM_ADDR hands,
    GM_ADDR high, GM_ADDR slots, GM_ADDR new_slots, GM_ADDR miss_ids, GM_ADDR miss_slots, GM_ADDR miss_counts,
    GM_ADDR stats, GM_ADDR kinds, GM_ADDR miss_positions, GM_ADDR workspace,
    kvoffload::ascendc::PlanTiling tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
  kvoffload::ascendc::dsa_plan({topk, query_start_loc, seq_lens, rows, tags, ages, hands, high, slots, new_slots,
                                miss_ids, miss_slots, miss_counts, stats, kinds, miss_positions, workspace},
                               tiling);
}
