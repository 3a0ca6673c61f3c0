// A core's report to the host: one cache line per core, so that no two cores share one.
#pragma once

#include "copy.h"
#include "order.h"
#include "tiling_data.h"

namespace kvoffload::ascendc {

class CoreReport {
 public:
  __aicore__ inline void init(AscendC::TPipe& pipe, GM_ADDR reports) {
    reports_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(reports));
    pipe.InitBuffer(buffer_, kReportInts * 8);
  }

  __aicore__ inline void write(int64_t fetched_bytes, int64_t refused_rows) {
    AscendC::LocalTensor<int64_t> line = buffer_.Get<int64_t>();
    line.SetValue(0, fetched_bytes);
    line.SetValue(1, refused_rows);
    for (int32_t i = 2; i < kReportInts; ++i) line.SetValue(i, 0);
    KVOFFLOAD_ORDER(S_MTE3);
    store(reports_, static_cast<uint64_t>(AscendC::GetBlockIdx()) * kReportInts * 2, buffer_.Get<int32_t>(),
          kReportInts * 2);
  }

 private:
  AscendC::GlobalTensor<int32_t> reports_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> buffer_;
};

}  // namespace kvoffload::ascendc
