// Copies between global memory and the unified buffer, of any number of bytes.
#pragma once

#include "kernel_operator.h"

namespace kvoffload::ascendc {

// `count` elements from `offset` on. Bytes of the last 32-byte block behind them are undefined.
template <typename T>
__aicore__ inline void load(const AscendC::LocalTensor<T>& to, const AscendC::GlobalTensor<T>& from, uint64_t offset,
                            uint32_t count) {
  const AscendC::DataCopyExtParams copy{1, static_cast<uint32_t>(count * sizeof(T)), 0, 0, 0};
  const AscendC::DataCopyPadExtParams<T> pad{false, 0, 0, static_cast<T>(0)};
  AscendC::DataCopyPad(to, from[offset], copy, pad);
}

template <typename T>
__aicore__ inline void store(const AscendC::GlobalTensor<T>& to, uint64_t offset, const AscendC::LocalTensor<T>& from,
                             uint32_t count) {
  const AscendC::DataCopyExtParams copy{1, static_cast<uint32_t>(count * sizeof(T)), 0, 0, 0};
  AscendC::DataCopyPad(to[offset], from, copy);
}

// `blocks` pieces of `bytes` bytes, side by side in global memory, each at the next 32-byte block of the buffer.
__aicore__ inline void load_blocks(const AscendC::LocalTensor<uint8_t>& to,
                                   const AscendC::GlobalTensor<uint8_t>& from, uint64_t offset, uint16_t blocks,
                                   uint32_t bytes) {
  const AscendC::DataCopyExtParams copy{blocks, bytes, 0, 0, 0};
  const AscendC::DataCopyPadExtParams<uint8_t> pad{false, 0, 0, 0};
  AscendC::DataCopyPad(to, from[offset], copy, pad);
}

__aicore__ inline void store_blocks(const AscendC::GlobalTensor<uint8_t>& to, uint64_t offset,
                                    const AscendC::LocalTensor<uint8_t>& from, uint16_t blocks, uint32_t bytes) {
  const AscendC::DataCopyExtParams copy{blocks, bytes, 0, 0, 0};
  AscendC::DataCopyPad(to[offset], from, copy);
}

}  // namespace kvoffload::ascendc
