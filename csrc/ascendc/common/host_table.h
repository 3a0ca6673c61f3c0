// The block table of one request at a time, staged in the unified buffer.
#pragma once

#include "copy.h"
#include "order.h"
#include "tiling_data.h"

namespace kvoffload::ascendc {

constexpr int32_t kNoHostRow = -1;

class HostTable {
 public:
  __aicore__ inline void init(AscendC::TPipe& pipe, const HostTiling& host, GM_ADDR tables) {
    host_ = host;
    tables_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(tables));
    pipe.InitBuffer(buffer_, (host.table_width * 4 + kUbBlockBytes - 1) / kUbBlockBytes * kUbBlockBytes);
    table_ = buffer_.Get<int32_t>();
  }

  // Does nothing when `request`'s table is there already. The caller orders the load before look-ups (MTE2_S).
  __aicore__ inline void fetch(int32_t request) {
    if (request == request_) return;
    request_ = request;
    KVOFFLOAD_ORDER(S_MTE2);  // look-ups in the table that stood here
    load(table_, tables_, static_cast<uint64_t>(request) * host_.table_width, host_.table_width);
  }

  // Row of the host pool that holds token `id`; kNoHostRow when no block does.
  __aicore__ inline int32_t row(int32_t id) const {
    if (id < 0) return kNoHostRow;
    const int32_t index = host_.block_bits >= 0 ? id >> host_.block_bits : id / host_.block_size;
    if (index >= host_.table_width) return kNoHostRow;
    const int32_t block = table_.GetValue(index);
    if (block < 0 || block >= host_.blocks) return kNoHostRow;
    return block * host_.block_size + (id - index * host_.block_size);
  }

 private:
  HostTiling host_;
  int32_t request_ = -1;
  AscendC::GlobalTensor<int32_t> tables_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> buffer_;
  AscendC::LocalTensor<int32_t> table_;
};

}  // namespace kvoffload::ascendc
