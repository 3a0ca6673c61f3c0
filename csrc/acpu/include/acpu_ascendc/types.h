// Names, enumerations and parameter structs of AscendC, with the field names, order and defaults of CANN's documentation.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../../core.h"

#define __aicore__
#define __global__
#define __schedmode__(mode)  // cores of a launch always run together here
#define __gm__
#define __ubuf__
#define GM_ADDR __gm__ uint8_t*
#define KERNEL_TASK_TYPE_DEFAULT(type) static_assert(::AscendC::is_kernel_type(::AscendC::type))
#define KERNEL_TASK_TYPE(key, type) static_assert(::AscendC::is_kernel_type(::AscendC::type))
#define TILING_KEY_IS(key) (::acpu::current_core().machine().options.tiling_key == (key))
// The tiling data is a plain struct; the generated reader copies it from global memory before the kernel starts.
#define GET_TILING_DATA_WITH_STRUCT(type, name, address) \
  type name;                                             \
  ::AscendC::detail::read_tiling(&name, address, sizeof(type))
#define REGISTER_TILING_DEFAULT(type) static_assert(true)

using half = _Float16;

// Bit pattern of a bfloat16; arithmetic goes through float.
struct bfloat16_t {
  uint16_t bits = 0;
  bfloat16_t() = default;
  explicit bfloat16_t(float value) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    bits = static_cast<uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16);  // to nearest even
  }
  explicit operator float() const {
    const uint32_t word = uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
  }
  bool operator==(const bfloat16_t&) const = default;
};

enum pipe_t { PIPE_S, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_ALL, PIPE_FIX };
enum event_t { EVENT_ID0, EVENT_ID1, EVENT_ID2, EVENT_ID3, EVENT_ID4, EVENT_ID5, EVENT_ID6, EVENT_ID7 };

namespace AscendC {

using TEventID = int8_t;
using ::acpu::Loc;

enum class TPosition : uint8_t { GM, A1, A2, B1, B2, C1, C2, CO1, CO2, VECIN, VECOUT, VECCALC, LCM, SPM, MAX };
using QuePosition = TPosition;

// Source pipe, then the pipe that waits.
enum class HardEvent : uint8_t {
  MTE2_V, V_MTE2, MTE3_V, V_MTE3, MTE3_MTE2, MTE2_MTE3, S_V, V_S, S_MTE2, MTE2_S, S_MTE3, MTE3_S, V_V,
};

// Types of cores that a kernel runs on. The twin has AI-vector cores only, regardless of the requested type.
enum KernelMetaType { KERNEL_TYPE_AIV_ONLY, KERNEL_TYPE_MIX_AIV_1_0 };
constexpr bool is_kernel_type(KernelMetaType) { return true; }

enum class CMPMODE : uint8_t { LT, GT, EQ, LE, GE, NE };
enum class SELMODE : uint8_t { VSEL_CMPMASK_SPR, VSEL_TENSOR_SCALAR_MODE, VSEL_TENSOR_TENSOR_MODE };
enum class RoundMode : uint8_t {
  CAST_NONE, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC, CAST_ODD,
};
enum class CacheLine : uint64_t { SINGLE_CACHE_LINE, ENTIRE_DATA_CACHE };
enum class DcciDst : uint64_t { CACHELINE_ALL, CACHELINE_UB, CACHELINE_OUT, CACHELINE_ATOMIC };
enum class ReduceOrder : uint8_t { ORDER_VALUE_INDEX, ORDER_INDEX_VALUE, ORDER_ONLY_VALUE, ORDER_ONLY_INDEX };

// Lengths and gaps in blocks of 32 bytes; a gap is from the end of one block to the start of the next.
struct DataCopyParams {
  uint16_t blockCount = 1;
  uint16_t blockLen = 0;
  union {
    uint16_t srcStride = 0;
    uint16_t srcGap;
  };
  union {
    uint16_t dstStride = 0;
    uint16_t dstGap;
  };
  DataCopyParams() = default;
  DataCopyParams(uint16_t count, uint16_t length, uint16_t src_stride, uint16_t dst_stride)
      : blockCount(count), blockLen(length), srcStride(src_stride), dstStride(dst_stride) {}
};

// Of DataCopyPad: blockLen in bytes, the stride of global memory in bytes, that of the unified buffer in blocks.
struct DataCopyExtParams {
  uint16_t blockCount = 1;
  uint32_t blockLen = 0;
  uint32_t srcStride = 0;
  uint32_t dstStride = 0;
  uint32_t rsv = 0;
  DataCopyExtParams() = default;
  DataCopyExtParams(uint16_t count, uint32_t length, uint32_t src_stride, uint32_t dst_stride, uint32_t reserved)
      : blockCount(count), blockLen(length), srcStride(src_stride), dstStride(dst_stride), rsv(reserved) {}
};

struct DataCopyPadParams {
  bool isPad = false;
  uint8_t leftPadding = 0;
  uint8_t rightPadding = 0;
  uint64_t paddingValue = 0;
  DataCopyPadParams() = default;
  DataCopyPadParams(bool pad, uint8_t left, uint8_t right, uint64_t value)
      : isPad(pad), leftPadding(left), rightPadding(right), paddingValue(value) {}
};

template <typename T>
struct DataCopyPadExtParams {
  bool isPad = false;
  uint8_t leftPadding = 0;
  uint8_t rightPadding = 0;
  T paddingValue = T();
  DataCopyPadExtParams() = default;
  DataCopyPadExtParams(bool pad, uint8_t left, uint8_t right, T value)
      : isPad(pad), leftPadding(left), rightPadding(right), paddingValue(value) {}
};

// Strides in blocks of 32 bytes: between blocks of a repeat, and between repeats.
struct UnaryRepeatParams {
  uint16_t dstBlkStride = 1;
  uint16_t srcBlkStride = 1;
  uint8_t dstRepStride = 8;
  uint8_t srcRepStride = 8;
  UnaryRepeatParams() = default;
  UnaryRepeatParams(uint16_t dst_block, uint16_t src_block, uint8_t dst_repeat, uint8_t src_repeat)
      : dstBlkStride(dst_block), srcBlkStride(src_block), dstRepStride(dst_repeat), srcRepStride(src_repeat) {}
};

struct BinaryRepeatParams {
  uint8_t dstBlkStride = 1;
  uint8_t src0BlkStride = 1;
  uint8_t src1BlkStride = 1;
  uint8_t dstRepStride = 8;
  uint8_t src0RepStride = 8;
  uint8_t src1RepStride = 8;
  BinaryRepeatParams() = default;
  BinaryRepeatParams(uint8_t dst_block, uint8_t src0_block, uint8_t src1_block, uint8_t dst_repeat,
                     uint8_t src0_repeat, uint8_t src1_repeat)
      : dstBlkStride(dst_block), src0BlkStride(src0_block), src1BlkStride(src1_block), dstRepStride(dst_repeat),
        src0RepStride(src0_repeat), src1RepStride(src1_repeat) {}
};

struct GatherMaskParams {
  uint8_t src0BlockStride = 1;
  uint16_t repeatTimes = 0;
  uint16_t src0RepeatStride = 0;
  uint8_t src1RepeatStride = 0;
  GatherMaskParams() = default;
  GatherMaskParams(uint8_t block_stride, uint16_t repeats, uint16_t src0_repeat, uint8_t src1_repeat)
      : src0BlockStride(block_stride), repeatTimes(repeats), src0RepeatStride(src0_repeat),
        src1RepeatStride(src1_repeat) {}
};

struct BrcbRepeatParams {
  uint16_t dstBlkStride = 1;
  uint16_t dstRepStride = 8;
  BrcbRepeatParams() = default;
  BrcbRepeatParams(uint16_t block_stride, uint16_t repeat_stride)
      : dstBlkStride(block_stride), dstRepStride(repeat_stride) {}
};

namespace detail {

inline ::acpu::Core& core() { return ::acpu::current_core(); }

inline void read_tiling(void* to, const void* from, size_t bytes, const Loc& loc = Loc::current()) {
  const ::acpu::SiteId site = core().site("GET_TILING_DATA", loc);
  core().gm_read(site, from, bytes, to);
}

}  // namespace detail

inline int64_t GetBlockIdx() { return detail::core().index(); }
inline int64_t GetBlockNum() { return detail::core().count(); }
inline int64_t GetSubBlockIdx() { return 0; }
// The twin's system workspace is empty: the user's part starts where the kernel argument points.
inline GM_ADDR GetUserWorkspace(GM_ADDR workspace) { return workspace; }

// The place of the lowest bit of that value, -1 if there is none.
template <int countValue>
int64_t ScalarGetSFFValue(uint64_t valueIn) {
  static_assert(countValue == 0 || countValue == 1);
  const uint64_t bits = countValue == 1 ? valueIn : ~valueIn;
  return bits == 0 ? -1 : std::countr_zero(bits);
}

template <typename T>
constexpr T AlignUp(T value, T unit) {
  return (value + unit - 1) / unit * unit;
}

}  // namespace AscendC
