// Vector primitives of the plan for aarch64, whose every processor has them (Advanced SIMD).
#include <arm_neon.h>

#include <cstdint>

#include "lanes.h"

namespace kvoffload {
namespace {

// There is no move-mask: lanes that are all ones or zero keep one bit each, a different one, and are added up.
inline std::uint32_t mask_of(uint8x16_t lanes) {
  const uint8x16_t weights = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const uint8x16_t bits = vandq_u8(lanes, weights);
  return vaddv_u8(vget_low_u8(bits)) | static_cast<std::uint32_t>(vaddv_u8(vget_high_u8(bits))) << 8;
}

// 0xff in every byte whose bit is set in the low 16 bits of `ways`.
inline uint8x16_t byte_mask(std::uint32_t ways) {
  const uint8x16_t weights = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const uint8x8_t low = vdup_n_u8(static_cast<std::uint8_t>(ways));
  const uint8x8_t high = vdup_n_u8(static_cast<std::uint8_t>(ways >> 8));
  return vtstq_u8(vcombine_u8(low, high), weights);
}

inline std::uint32_t match16(const std::int32_t* tags, int32x4_t id) {
  const uint32x4_t weights = {1, 2, 4, 8};
  uint32x4_t bits = vandq_u32(vceqq_s32(vld1q_s32(tags), id), weights);
  bits = vorrq_u32(bits, vandq_u32(vceqq_s32(vld1q_s32(tags + 4), id), vshlq_n_u32(weights, 4)));
  bits = vorrq_u32(bits, vandq_u32(vceqq_s32(vld1q_s32(tags + 8), id), vshlq_n_u32(weights, 8)));
  bits = vorrq_u32(bits, vandq_u32(vceqq_s32(vld1q_s32(tags + 12), id), vshlq_n_u32(weights, 12)));
  return vaddvq_u32(bits);
}

inline std::uint32_t match8(const std::int32_t* tags, int32x4_t id) {
  const uint32x4_t weights = {1, 2, 4, 8};
  const uint32x4_t bits = vandq_u32(vceqq_s32(vld1q_s32(tags), id), weights);
  return vaddvq_u32(vorrq_u32(bits, vandq_u32(vceqq_s32(vld1q_s32(tags + 4), id), vshlq_n_u32(weights, 4))));
}

template <int W>
struct Lanes {
  static std::uint32_t match(const std::int32_t* tags, std::int32_t id) {
    const int32x4_t wanted = vdupq_n_s32(id);
    std::uint32_t mask = 0;
    for (int way = 0; way < W; way += 16) mask |= match16(tags + way, wanted) << way;
    return mask;
  }

  static std::uint32_t zero(const std::uint8_t* bytes) {
    std::uint32_t mask = 0;
    for (int way = 0; way < W; way += 16) mask |= mask_of(vceqzq_u8(vld1q_u8(bytes + way))) << way;
    return mask;
  }

  template <int kBit>
  static std::uint32_t with_bit(const std::uint8_t* ages) {
    const uint8x16_t bit = vdupq_n_u8(1 << kBit);
    std::uint32_t mask = 0;
    for (int way = 0; way < W; way += 16) mask |= mask_of(vtstq_u8(vld1q_u8(ages + way), bit)) << way;
    return mask;
  }

  static void fill(std::uint8_t* ages, std::uint32_t ways, std::uint8_t value) {
    for (int way = 0; way < W; way += 16) {
      vst1q_u8(ages + way, vbslq_u8(byte_mask(ways >> way), vdupq_n_u8(value), vld1q_u8(ages + way)));
    }
  }

  static void add(std::uint8_t* ages, std::uint32_t ways, std::uint8_t delta) {
    for (int way = 0; way < W; way += 16) {
      const uint8x16_t step = vandq_u8(byte_mask(ways >> way), vdupq_n_u8(delta));
      vst1q_u8(ages + way, vaddq_u8(vld1q_u8(ages + way), step));
    }
  }

  static std::int32_t* settle_block(std::int32_t first, const std::uint32_t* bases, const std::uint32_t* found,
                                    std::int32_t* slots, std::int32_t* pending) {
    return settle_positions(first, bases, found, slots, pending);
  }

  template <class P>
  static std::int64_t settle_partition(std::uint8_t* ages, const std::uint8_t* needed, std::int64_t slots) {
    std::int64_t count = 0;
    for (std::int64_t first = 0; first < slots; first += 16) {
      const uint8x16_t used = vld1q_u8(needed + first);
      count += vaddvq_u8(used);
      if constexpr (kHitChangesAge<P>) {
        const uint8x16_t old = vld1q_u8(ages + first);
        vst1q_u8(ages + first, vbslq_u8(vceqzq_u8(used), old, after_hit<P>(old)));
      }
    }
    return count;
  }

 private:
  template <class P>
  static uint8x16_t after_hit(uint8x16_t ages) {
    const uint8x16_t floor = vdupq_n_u8(P::kHitFloor);
    if constexpr (kHitForgetsAge<P>) return floor;
    return vmaxq_u8(vqsubq_u8(ages, vdupq_n_u8(P::kHitLowers)), floor);
  }
};

// One set's 8 bytes in each half of a register.
template <>
struct Pair<8> {
  static std::uint32_t match(const std::int32_t* first, const std::int32_t* second, std::int32_t id) {
    const int32x4_t wanted = vdupq_n_s32(id);
    return match8(first, wanted) | match8(second, wanted) << 8;
  }

  static std::uint32_t zero(const std::uint8_t* first, const std::uint8_t* second) {
    return mask_of(vceqzq_u8(load(first, second)));
  }

  template <int kBit>
  static std::uint32_t with_bit(const std::uint8_t* first, const std::uint8_t* second) {
    return mask_of(vtstq_u8(load(first, second), vdupq_n_u8(1 << kBit)));
  }

  static void fill(std::uint8_t* first, std::uint8_t* second, std::uint32_t ways, std::uint8_t value) {
    store(first, second, vbslq_u8(byte_mask(ways), vdupq_n_u8(value), load(first, second)));
  }

  static void add(std::uint8_t* first, std::uint8_t* second, std::uint32_t ways, std::uint8_t delta) {
    store(first, second, vaddq_u8(load(first, second), vandq_u8(byte_mask(ways), vdupq_n_u8(delta))));
  }

 private:
  static uint8x16_t load(const std::uint8_t* first, const std::uint8_t* second) {
    return vcombine_u8(vld1_u8(first), vld1_u8(second));
  }
  static void store(std::uint8_t* first, std::uint8_t* second, uint8x16_t value) {
    vst1_u8(first, vget_low_u8(value));
    vst1_u8(second, vget_high_u8(value));
  }
};

}  // namespace
}  // namespace kvoffload

#include "plan_kernel.h"

namespace kvoffload {

PlanRequestFn neon_planner(Policy policy, Placement placement, int ways) {
  return planner(policy, placement, ways);
}

}  // namespace kvoffload
