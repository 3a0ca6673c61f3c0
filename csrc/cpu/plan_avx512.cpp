// Vector primitives of the plan for AVX-512 (F, BW, CD, VL): a set of 16 tags is one load and one compare.
#include <immintrin.h>

#include <cstdint>

#include "lanes.h"

namespace kvoffload {
namespace {

// A 16-bit mask as an integer. Not a cast: when it runs out of registers, GCC 12 spills the mask as two bytes and
// reads four back, so that the upper half is garbage.
inline std::uint32_t integer(__mmask16 mask) {
  std::uint32_t value;
  asm("kmovw %1, %0" : "=r"(value) : "k"(mask));
  return value;
}

// Code that doesn't depend on the number of ways.
struct Settling {
  // settle_positions for 16 lanes at once. A found mask has one bit, whose number is 31 minus its leading zeros.
  static std::int32_t* settle_block(std::int32_t first, const std::uint32_t* bases, const std::uint32_t* found,
                                    std::int32_t* slots, std::int32_t* pending) {
    const __m512i masks = _mm512_load_si512(found);
    const __m512i way = _mm512_sub_epi32(_mm512_set1_epi32(31), _mm512_lzcnt_epi32(masks));
    const __m512i slot = _mm512_add_epi32(_mm512_load_si512(bases), way);
    const __mmask16 missing = _mm512_testn_epi32_mask(masks, masks);
    _mm512_storeu_si512(slots, _mm512_mask_set1_epi32(slot, missing, kNoSlot));
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i positions = _mm512_add_epi32(lane, _mm512_set1_epi32(first));
    // Compressed in the register and stored whole: the list has room, and storing compressed is slow on some
    // processors.
    _mm512_storeu_si512(pending, _mm512_maskz_compress_epi32(missing, positions));
    return pending + __builtin_popcount(integer(missing));
  }

  // 64 slots at a time.
  template <class P>
  static std::int64_t settle_partition(std::uint8_t* ages, const std::uint8_t* needed, std::int64_t slots) {
    std::int64_t count = 0;
    for (std::int64_t first = 0; first < slots; first += 64) {
      const __mmask64 inside = slots - first >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << (slots - first)) - 1;
      const __m512i bytes = _mm512_maskz_loadu_epi8(inside, needed + first);
      const __mmask64 used = _mm512_test_epi8_mask(bytes, bytes);
      count += __builtin_popcountll(used);
      if constexpr (kHitChangesAge<P>) {
        if (inside == ~std::uint64_t{0}) {
          const __m512i old = _mm512_loadu_si512(ages + first);
          _mm512_storeu_si512(ages + first, _mm512_mask_mov_epi8(old, used, after_hit<P>(old)));
        } else {
          const __m512i old = _mm512_maskz_loadu_epi8(inside, ages + first);
          _mm512_mask_storeu_epi8(ages + first, used, after_hit<P>(old));
        }
      }
    }
    return count;
  }

 private:
  template <class P>
  static __m512i after_hit(__m512i ages) {
    const __m512i floor = _mm512_set1_epi8(static_cast<char>(P::kHitFloor));
    if constexpr (kHitForgetsAge<P>) return floor;
    return _mm512_max_epu8(_mm512_subs_epu8(ages, _mm512_set1_epi8(static_cast<char>(P::kHitLowers))), floor);
  }
};

template <>
struct Lanes<16> : Settling {
  static std::uint32_t match(const std::int32_t* tags, std::int32_t id) {
    return integer(_mm512_cmpeq_epi32_mask(_mm512_loadu_si512(tags), _mm512_set1_epi32(id)));
  }

  static std::uint32_t zero(const std::uint8_t* bytes) {
    const __m128i values = load(bytes);
    return integer(_mm_testn_epi8_mask(values, values));
  }

  // The shift brings the bit to the top of each byte.
  template <int kBit>
  static std::uint32_t with_bit(const std::uint8_t* ages) {
    return static_cast<std::uint32_t>(_mm_movemask_epi8(_mm_slli_epi16(load(ages), 7 - kBit)));
  }

  static void fill(std::uint8_t* ages, std::uint32_t ways, std::uint8_t value) {
    store(ages, _mm_mask_set1_epi8(load(ages), static_cast<__mmask16>(ways), static_cast<char>(value)));
  }

  static void add(std::uint8_t* ages, std::uint32_t ways, std::uint8_t delta) {
    const __m128i step = _mm_maskz_set1_epi8(static_cast<__mmask16>(ways), static_cast<char>(delta));
    store(ages, _mm_add_epi8(load(ages), step));
  }

 private:
  static __m128i load(const std::uint8_t* ages) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(ages)); }
  static void store(std::uint8_t* ages, __m128i value) { _mm_storeu_si128(reinterpret_cast<__m128i*>(ages), value); }
};

template <>
struct Lanes<32> : Settling {
  static std::uint32_t match(const std::int32_t* tags, std::int32_t id) {
    return Lanes<16>::match(tags, id) | Lanes<16>::match(tags + 16, id) << 16;
  }

  static std::uint32_t zero(const std::uint8_t* bytes) {
    return Lanes<16>::zero(bytes) | Lanes<16>::zero(bytes + 16) << 16;
  }

  template <int kBit>
  static std::uint32_t with_bit(const std::uint8_t* ages) {
    return static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_slli_epi16(load(ages), 7 - kBit)));
  }

  static void fill(std::uint8_t* ages, std::uint32_t ways, std::uint8_t value) {
    store(ages, _mm256_mask_set1_epi8(load(ages), ways, static_cast<char>(value)));
  }

  static void add(std::uint8_t* ages, std::uint32_t ways, std::uint8_t delta) {
    store(ages, _mm256_add_epi8(load(ages), _mm256_maskz_set1_epi8(ways, static_cast<char>(delta))));
  }

 private:
  static __m256i load(const std::uint8_t* ages) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(ages)); }
  static void store(std::uint8_t* ages, __m256i value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(ages), value);
  }
};

// One set's 8 tags or 8 bytes in each half of a register.
template <>
struct Pair<8> {
  static std::uint32_t match(const std::int32_t* first, const std::int32_t* second, std::int32_t id) {
    const __m512i lower = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(first)));
    const __m256i upper = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second));
    return integer(_mm512_cmpeq_epi32_mask(_mm512_inserti64x4(lower, upper, 1), _mm512_set1_epi32(id)));
  }

  static std::uint32_t zero(const std::uint8_t* first, const std::uint8_t* second) {
    const __m128i values = load(first, second);
    return integer(_mm_testn_epi8_mask(values, values));
  }

  template <int kBit>
  static std::uint32_t with_bit(const std::uint8_t* first, const std::uint8_t* second) {
    return static_cast<std::uint32_t>(_mm_movemask_epi8(_mm_slli_epi16(load(first, second), 7 - kBit)));
  }

  static void fill(std::uint8_t* first, std::uint8_t* second, std::uint32_t ways, std::uint8_t value) {
    const __m128i old = load(first, second);
    store(first, second, _mm_mask_set1_epi8(old, static_cast<__mmask16>(ways), static_cast<char>(value)));
  }

  static void add(std::uint8_t* first, std::uint8_t* second, std::uint32_t ways, std::uint8_t delta) {
    const __m128i step = _mm_maskz_set1_epi8(static_cast<__mmask16>(ways), static_cast<char>(delta));
    store(first, second, _mm_add_epi8(load(first, second), step));
  }

 private:
  static __m128i load(const std::uint8_t* first, const std::uint8_t* second) {
    return _mm_unpacklo_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(first)),
                              _mm_loadl_epi64(reinterpret_cast<const __m128i*>(second)));
  }
  static void store(std::uint8_t* first, std::uint8_t* second, __m128i value) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(first), value);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(second), _mm_unpackhi_epi64(value, value));
  }
};

}  // namespace
}  // namespace kvoffload

#include "plan_kernel.h"

namespace kvoffload {

PlanRequestFn avx512_planner(Policy policy, Placement placement, int ways) {
  return planner(policy, placement, ways);
}

}  // namespace kvoffload
