// Vector primitives of the plan for AVX-512 (F, BW, VL): a set of 16 tags is one load and one compare.
#include <immintrin.h>

#include <cstdint>

namespace kvoffload {
namespace {

// A 16-bit mask as an integer. Not a cast: when it runs out of registers, GCC 12 spills the mask as two bytes and
// reads four back, so that the upper half is garbage.
inline std::uint32_t integer(__mmask16 mask) {
  std::uint32_t value;
  asm("kmovw %1, %0" : "=r"(value) : "k"(mask));
  return value;
}

template <int W>
struct Lanes;

template <>
struct Lanes<16> {
  static std::uint32_t match(const std::int32_t* tags, std::int32_t id) {
    return integer(_mm512_cmpeq_epi32_mask(_mm512_loadu_si512(tags), _mm512_set1_epi32(id)));
  }

  static std::uint32_t equal(const std::uint8_t* ages, std::uint8_t value) {
    const __m128i same = _mm_cmpeq_epi8(load(ages), _mm_set1_epi8(static_cast<char>(value)));
    return static_cast<std::uint32_t>(_mm_movemask_epi8(same));
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
struct Lanes<32> {
  static std::uint32_t match(const std::int32_t* tags, std::int32_t id) {
    return Lanes<16>::match(tags, id) | Lanes<16>::match(tags + 16, id) << 16;
  }

  static std::uint32_t equal(const std::uint8_t* ages, std::uint8_t value) {
    return _mm256_cmpeq_epi8_mask(load(ages), _mm256_set1_epi8(static_cast<char>(value)));
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

}  // namespace
}  // namespace kvoffload

#include "plan_kernel.h"

namespace kvoffload {

PlanRequestFn avx512_planner(Policy policy, int ways) { return planner(policy, ways); }

}  // namespace kvoffload
