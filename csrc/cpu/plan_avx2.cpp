// Vector primitives of the plan for AVX2.
#include <immintrin.h>

#include <cstdint>

#include "lanes.h"

namespace kvoffload {
namespace {

inline std::uint32_t match8(const std::int32_t* tags, __m256i id) {
  const __m256i lanes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tags));
  return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(lanes, id))));
}

// 0xff in every byte whose bit is set in the low 16 bits of `ways`.
inline __m128i byte_mask(std::uint32_t ways) {
  const __m128i bits = _mm_set1_epi64x(static_cast<long long>(0x8040201008040201ull));
  const __m128i pick = _mm_set_epi8(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
  const __m128i spread = _mm_shuffle_epi8(_mm_cvtsi32_si128(static_cast<int>(ways)), pick);
  return _mm_cmpeq_epi8(_mm_and_si128(spread, bits), bits);
}

template <int W>
struct Lanes {
  static std::uint32_t match(const std::int32_t* tags, std::int32_t id) {
    const __m256i wanted = _mm256_set1_epi32(id);
    std::uint32_t mask = 0;
    for (int way = 0; way < W; way += 8) mask |= match8(tags + way, wanted) << way;
    return mask;
  }

  static std::uint32_t zero(const std::uint8_t* bytes) {
    std::uint32_t mask = 0;
    for (int way = 0; way < W; way += 16) {
      const int zeros = _mm_movemask_epi8(_mm_cmpeq_epi8(load(bytes + way), _mm_setzero_si128()));
      mask |= static_cast<std::uint32_t>(zeros) << way;
    }
    return mask;
  }

  // The shift brings the bit to the top of each byte.
  template <int kBit>
  static std::uint32_t with_bit(const std::uint8_t* ages) {
    std::uint32_t mask = 0;
    for (int way = 0; way < W; way += 16) {
      const int bits = _mm_movemask_epi8(_mm_slli_epi16(load(ages + way), 7 - kBit));
      mask |= static_cast<std::uint32_t>(bits) << way;
    }
    return mask;
  }

  static void fill(std::uint8_t* ages, std::uint32_t ways, std::uint8_t value) {
    const __m128i filler = _mm_set1_epi8(static_cast<char>(value));
    for (int way = 0; way < W; way += 16) {
      store(ages + way, _mm_blendv_epi8(load(ages + way), filler, byte_mask(ways >> way)));
    }
  }

  static void add(std::uint8_t* ages, std::uint32_t ways, std::uint8_t delta) {
    const __m128i step = _mm_set1_epi8(static_cast<char>(delta));
    for (int way = 0; way < W; way += 16) {
      store(ages + way, _mm_add_epi8(load(ages + way), _mm_and_si128(step, byte_mask(ways >> way))));
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
      const __m128i unneeded = _mm_cmpeq_epi8(load(needed + first), _mm_setzero_si128());
      count += 16 - __builtin_popcount(static_cast<std::uint32_t>(_mm_movemask_epi8(unneeded)));
      if constexpr (kHitChangesAge<P>) {
        const __m128i old = load(ages + first);
        store(ages + first, _mm_blendv_epi8(after_hit<P>(old), old, unneeded));
      }
    }
    return count;
  }

 private:
  template <class P>
  static __m128i after_hit(__m128i ages) {
    const __m128i floor = _mm_set1_epi8(static_cast<char>(P::kHitFloor));
    if constexpr (kHitForgetsAge<P>) return floor;
    return _mm_max_epu8(_mm_subs_epu8(ages, _mm_set1_epi8(static_cast<char>(P::kHitLowers))), floor);
  }
  static __m128i load(const std::uint8_t* ages) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(ages));
  }
  static void store(std::uint8_t* ages, __m128i value) { _mm_storeu_si128(reinterpret_cast<__m128i*>(ages), value); }
};

// One set's 8 bytes in each half of a register.
template <>
struct Pair<8> {
  static std::uint32_t match(const std::int32_t* first, const std::int32_t* second, std::int32_t id) {
    const __m256i wanted = _mm256_set1_epi32(id);
    return match8(first, wanted) | match8(second, wanted) << 8;
  }

  static std::uint32_t zero(const std::uint8_t* first, const std::uint8_t* second) {
    return bits(_mm_cmpeq_epi8(load(first, second), _mm_setzero_si128()));
  }

  template <int kBit>
  static std::uint32_t with_bit(const std::uint8_t* first, const std::uint8_t* second) {
    return bits(_mm_slli_epi16(load(first, second), 7 - kBit));
  }

  static void fill(std::uint8_t* first, std::uint8_t* second, std::uint32_t ways, std::uint8_t value) {
    const __m128i filler = _mm_set1_epi8(static_cast<char>(value));
    store(first, second, _mm_blendv_epi8(load(first, second), filler, byte_mask(ways)));
  }

  static void add(std::uint8_t* first, std::uint8_t* second, std::uint32_t ways, std::uint8_t delta) {
    const __m128i step = _mm_and_si128(_mm_set1_epi8(static_cast<char>(delta)), byte_mask(ways));
    store(first, second, _mm_add_epi8(load(first, second), step));
  }

 private:
  static std::uint32_t bits(__m128i bytes) { return static_cast<std::uint32_t>(_mm_movemask_epi8(bytes)); }
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

PlanRequestFn avx2_planner(Policy policy, Placement placement, int ways) {
  return planner(policy, placement, ways);
}

}  // namespace kvoffload
