// Consecutive numbers by doubling: CreateVecIndex alone takes an instruction for every few elements.
#pragma once

#include "kernel_operator.h"

namespace kvoffload::ascendc {

// to[i] = first + i. Of the vector pipe, and complete for it.
__aicore__ inline void number(const AscendC::LocalTensor<int32_t>& to, int32_t first, int32_t count) {
  constexpr int32_t kSeed = 8;  // one block
  AscendC::CreateVecIndex(to, first, kSeed);
  AscendC::PipeBarrier<PIPE_V>();
  for (int32_t done = kSeed; done < count; done *= 2) {
    const int32_t more = count - done < done ? count - done : done;
    AscendC::Adds(to[done], to, done, more);
    AscendC::PipeBarrier<PIPE_V>();
  }
}

}  // namespace kvoffload::ascendc
