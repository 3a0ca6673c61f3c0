// An int32 array of global memory, or a window of it, in the unified buffer.
#pragma once

#include "copy.h"
#include "tiling_data.h"

namespace kvoffload::ascendc {

class StagedInts {
 public:
  // `capacity`: of the window.
  __aicore__ inline void init(AscendC::TPipe& pipe, GM_ADDR data, int32_t capacity) {
    data_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(data));
    const int32_t bytes = (capacity * 4 + kUbBlockBytes - 1) / kUbBlockBytes * kUbBlockBytes;
    pipe.InitBuffer(buffer_, bytes > 0 ? bytes : kUbBlockBytes);
    window_ = buffer_.Get<int32_t>();
  }

  // The caller orders it before (S_MTE2) and after (MTE2_S).
  __aicore__ inline void fetch(uint64_t offset, int32_t count) {
    if (count > 0) load(window_, data_, offset, count);
  }

  __aicore__ inline int32_t operator[](int32_t index) const { return window_.GetValue(index); }

 private:
  AscendC::GlobalTensor<int32_t> data_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> buffer_;
  AscendC::LocalTensor<int32_t> window_;
};

}  // namespace kvoffload::ascendc
