// Results of each instruction, under every schedule.
#include <cmath>

#include "harness.h"

using namespace AscendC;
using testing::run;
using testing::with;

namespace {

// Tensors of a kernel, filled and read by the scalar unit.
class Bench {
 public:
  template <typename T>
  LocalTensor<T> filled(const std::vector<T>& values) {
    auto tensor = space<T>(values.size());
    for (uint32_t i = 0; i < values.size(); ++i) tensor.SetValue(i, values[i]);
    PipeBarrier<PIPE_ALL>();
    return tensor;
  }
  template <typename T>
  LocalTensor<T> space(size_t count) {
    TBuf<TPosition::VECCALC> buffer;
    pipe_.InitBuffer(buffer, static_cast<uint32_t>(count * sizeof(T)));
    return buffer.Get<T>(static_cast<uint32_t>(count));
  }
  template <typename T>
  std::vector<T> read(const LocalTensor<T>& tensor, size_t count) {
    PipeBarrier<PIPE_ALL>();
    std::vector<T> values;
    for (uint32_t i = 0; i < count; ++i) values.push_back(tensor.GetValue(i));
    PipeBarrier<PIPE_ALL>();
    return values;
  }

 private:
  TPipe pipe_;
};

void everywhere(const std::function<void(Bench&)>& kernel, const acpu::Loc& loc = acpu::Loc::current()) {
  for (acpu::Schedule schedule : testing::kSchedules) {
    const acpu::Result result = run(
        [&] {
          Bench bench;
          kernel(bench);
        },
        with(schedule));
    if (!result.clean()) testing::fail(loc.file_name(), static_cast<int>(loc.line()), result.text());
  }
}

template <typename T>
std::vector<T> ramp(size_t count, int first = 0, int step = 1) {
  std::vector<T> values;
  for (size_t i = 0; i < count; ++i) values.push_back(static_cast<T>(first + static_cast<int>(i) * step));
  return values;
}

template <typename T>
void check_arithmetic() {
  everywhere([](Bench& bench) {
    auto a = bench.filled(ramp<T>(40, -5, 3)), b = bench.filled(ramp<T>(40, 7, -2));
    auto out = bench.space<T>(40);
    auto expect = [&](auto f) {
      const auto got = bench.read(out, 40);
      for (int i = 0; i < 40; ++i) CHECK(got[i] == static_cast<T>(f(-5 + 3 * i, 7 - 2 * i)));
    };
    Add(out, a, b, 40);
    expect([](int x, int y) { return x + y; });
    Sub(out, a, b, 40);
    expect([](int x, int y) { return x - y; });
    Mul(out, a, b, 40);
    expect([](int x, int y) { return static_cast<T>(x) * static_cast<T>(y); });
    Max(out, a, b, 40);
    expect([](int x, int y) { return x > y ? x : y; });
    Min(out, a, b, 40);
    expect([](int x, int y) { return x < y ? x : y; });
    Adds(out, a, static_cast<T>(11), 40);
    expect([](int x, int) { return x + 11; });
    Muls(out, a, static_cast<T>(-2), 40);
    expect([](int x, int) { return x * -2; });
    Maxs(out, a, static_cast<T>(10), 40);
    expect([](int x, int) { return x > 10 ? x : 10; });
    Mins(out, a, static_cast<T>(10), 40);
    expect([](int x, int) { return x < 10 ? x : 10; });
    Duplicate(out, static_cast<T>(3), 40);
    expect([](int, int) { return 3; });
    CreateVecIndex(out, static_cast<T>(4), 40);
    const auto index = bench.read(out, 40);
    for (int i = 0; i < 40; ++i) CHECK(index[i] == static_cast<T>(4 + i));
    ArithProgression(out, static_cast<T>(4), static_cast<T>(-3), 40);
    const auto progression = bench.read(out, 40);
    for (int i = 0; i < 40; ++i) CHECK(progression[i] == static_cast<T>(4 - 3 * i));
  });
}

TEST(arithmetic) {
  check_arithmetic<int16_t>();
  check_arithmetic<int32_t>();
  check_arithmetic<half>();
  check_arithmetic<float>();
}

TEST(integers_wrap_around) {
  everywhere([](Bench& bench) {
    auto a = bench.filled<int32_t>(std::vector<int32_t>(8, INT32_MAX));
    Adds(a, a, 1, 8);
    CHECK(bench.read(a, 1)[0] == INT32_MIN);
    auto b = bench.filled<int16_t>(std::vector<int16_t>(16, INT16_MIN));
    Muls(b, b, int16_t{3}, 16);
    CHECK(bench.read(b, 1)[0] == INT16_MIN);
  });
}

TEST(in_place_is_allowed) {
  everywhere([](Bench& bench) {
    auto a = bench.filled(ramp<int32_t>(16));
    Add(a, a, a, 16);
    CHECK(bench.read(a, 16)[15] == 30);
  });
}

TEST(shifts) {
  everywhere([](Bench& bench) {
    auto a = bench.filled<int32_t>({-8, -1, 5, 1 << 30, 0, 1, 2, 3}), out = bench.space<int32_t>(8);
    ShiftRight(out, a, 1, 8);
    CHECK(bench.read(out, 4) == (std::vector<int32_t>{-4, -1, 2, 1 << 29}));
    ShiftLeft(out, a, 2, 8);
    CHECK(bench.read(out, 4) == (std::vector<int32_t>{-32, -4, 20, 0}));
    auto b = bench.filled<uint16_t>(std::vector<uint16_t>(16, 0x8001)), c = bench.space<uint16_t>(16);
    ShiftRight(c, b, uint16_t{1}, 16);
    CHECK(bench.read(c, 1)[0] == 0x4000);
    ShiftLeft(c, b, uint16_t{1}, 16);
    CHECK(bench.read(c, 1)[0] == 2);
    auto d = bench.filled<uint32_t>(std::vector<uint32_t>(8, 0x80000000u));
    ShiftRight(d, d, 31u, 8);
    CHECK(bench.read(d, 1)[0] == 1);
  });
}

TEST(bits) {
  everywhere([](Bench& bench) {
    auto a = bench.filled<uint16_t>(std::vector<uint16_t>(16, 0xF0F0));
    auto b = bench.filled<uint16_t>(std::vector<uint16_t>(16, 0xFF00)), out = bench.space<uint16_t>(16);
    And(out, a, b, 16);
    CHECK(bench.read(out, 1)[0] == 0xF000);
    Or(out, a, b, 16);
    CHECK(bench.read(out, 1)[0] == 0xFFF0);
    Not(out, a, 16);
    CHECK(bench.read(out, 1)[0] == 0x0F0F);
  });
}

TEST(casts) {
  everywhere([](Bench& bench) {
    auto a = bench.filled<float>({2.5f, 3.5f, -2.5f, 1e20f, -1e20f, NAN, 0.5f, -0.4f});
    auto out = bench.space<int32_t>(8);
    const auto cast = [&](RoundMode mode) {
      Cast(out, a, mode, 8);
      return bench.read(out, 8);
    };
    CHECK(cast(RoundMode::CAST_RINT) == (std::vector<int32_t>{2, 4, -2, INT32_MAX, INT32_MIN, 0, 0, 0}));
    CHECK(cast(RoundMode::CAST_FLOOR) == (std::vector<int32_t>{2, 3, -3, INT32_MAX, INT32_MIN, 0, 0, -1}));
    CHECK(cast(RoundMode::CAST_CEIL) == (std::vector<int32_t>{3, 4, -2, INT32_MAX, INT32_MIN, 0, 1, 0}));
    CHECK(cast(RoundMode::CAST_ROUND) == (std::vector<int32_t>{3, 4, -3, INT32_MAX, INT32_MIN, 0, 1, 0}));
    CHECK(cast(RoundMode::CAST_TRUNC) == (std::vector<int32_t>{2, 3, -2, INT32_MAX, INT32_MIN, 0, 0, 0}));
    auto back = bench.space<float>(8);
    auto ints = bench.filled(ramp<int32_t>(8, -3));
    Cast(back, ints, RoundMode::CAST_NONE, 8);
    CHECK(bench.read(back, 8)[0] == -3.0f && bench.read(back, 8)[7] == 4.0f);
    auto halves = bench.space<half>(16);
    Cast(halves, back, RoundMode::CAST_NONE, 8);
    Cast(back, bench.filled(ramp<half>(16, 1)), RoundMode::CAST_NONE, 8);
    CHECK(bench.read(halves, 1)[0] == static_cast<half>(-3) && bench.read(back, 3)[2] == 3.0f);
  });
}

TEST(comparisons) {
  everywhere([](Bench& bench) {
    auto a = bench.filled(ramp<float>(64)), b = bench.filled(ramp<float>(64, 63, -1));
    auto out = bench.space<uint8_t>(32);
    const auto compare = [&](CMPMODE mode) {
      Compare(out, a, b, mode, 64);
      return bench.read(out, 8);
    };
    CHECK(compare(CMPMODE::LT)[3] == 0xFF && compare(CMPMODE::LT)[4] == 0);
    CHECK(compare(CMPMODE::GT)[3] == 0 && compare(CMPMODE::GT)[4] == 0xFF);
    CHECK(compare(CMPMODE::EQ)[3] == 0 && compare(CMPMODE::NE)[3] == 0xFF);
    const auto scalar = [&](CMPMODE mode) {
      CompareScalar(out, a, 9.0f, mode, 64);
      return bench.read(out, 8);
    };
    CHECK(scalar(CMPMODE::EQ) == (std::vector<uint8_t>{0, 2, 0, 0, 0, 0, 0, 0}));
    CHECK(scalar(CMPMODE::LE)[1] == 3 && scalar(CMPMODE::GE)[1] == 0xFE && scalar(CMPMODE::GE)[7] == 0xFF);
    auto ints = bench.filled(ramp<int32_t>(64, -10)), others = bench.filled(ramp<int32_t>(64, 10, -3));
    Compare(out, ints, others, CMPMODE::EQ, 64);
    CHECK(bench.read(out, 8) == (std::vector<uint8_t>{32, 0, 0, 0, 0, 0, 0, 0}));
    CompareScalar(out, ints, 0, CMPMODE::EQ, 64);
    CHECK(bench.read(out, 8) == (std::vector<uint8_t>{0, 4, 0, 0, 0, 0, 0, 0}));
  });
}

TEST(select_moves_bits) {
  everywhere([](Bench& bench) {
    auto mask = bench.filled<uint8_t>(std::vector<uint8_t>(32, 0x0F));
    auto a = bench.filled(std::vector<int32_t>(64, -1)), b = bench.filled(ramp<int32_t>(64));  // NaN as floats
    auto out = bench.space<float>(64);
    auto bits = out.ReinterpretCast<int32_t>();
    Select(out, mask, a.ReinterpretCast<float>(), b.ReinterpretCast<float>(), SELMODE::VSEL_TENSOR_TENSOR_MODE, 64);
    const auto both = bench.read(bits, 64);
    Select(out, mask, a.ReinterpretCast<float>(), 2.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, 64);
    const auto scalar = bench.read(bits, 64);
    for (int i = 0; i < 64; ++i) {
      CHECK(both[i] == (i % 8 < 4 ? -1 : i));
      CHECK(scalar[i] == (i % 8 < 4 ? -1 : 0x40000000));
    }
  });
}

TEST(gathers) {
  everywhere([](Bench& bench) {
    auto source = bench.filled(ramp<int32_t>(64, 100)), out = bench.space<int32_t>(8);
    auto offsets = bench.filled<uint32_t>({0, 252, 4, 8, 8, 128, 64, 60});
    Gather(out, source, offsets, 0, 8);
    CHECK(bench.read(out, 8) == (std::vector<int32_t>{100, 163, 101, 102, 102, 132, 116, 115}));
    auto low = bench.filled<uint32_t>({0, 4, 8, 12, 16, 20, 24, 28});
    Gather(out, source, low, 32, 8);
    CHECK(bench.read(out, 8) == ramp<int32_t>(8, 108));
  });
  everywhere([](Bench& bench) {
    auto source = bench.filled(ramp<uint32_t>(128)), out = bench.space<uint32_t>(128);
    auto offsets = bench.filled(ramp<uint32_t>(16, 480, -32));
    Gatherb(out, source, offsets, 2, {1, 8});
    const auto got = bench.read(out, 128);
    for (uint32_t i = 0; i < 128; ++i) CHECK(got[i] == (15 - i / 8) * 8 + i % 8);
  });
}

TEST(broadcast_of_blocks) {
  everywhere([](Bench& bench) {
    auto source = bench.filled(ramp<int32_t>(16, 5)), out = bench.space<int32_t>(128);
    Brcb(out, source, 2, {1, 8});
    const auto got = bench.read(out, 128);
    for (int i = 0; i < 128; ++i) CHECK(got[i] == 5 + i / 8);
    auto shorts = bench.filled(ramp<uint16_t>(16)), wide = bench.space<uint16_t>(256);
    Brcb(wide, shorts, 1, {2, 16});
    PipeBarrier<PIPE_ALL>();
    CHECK(wide.GetValue(32 * 7 + 15) == 7);
  });
}

TEST(gather_mask_by_tensor) {
  everywhere([](Bench& bench) {
    auto source = bench.filled(ramp<int32_t>(256, 1)), out = bench.space<int32_t>(256);
    auto mask = bench.filled(std::vector<uint32_t>(8, 0xAAAAAAAAu));
    uint64_t kept = 0;
    // The example of the documentation: twice 70 elements, the second time from the 33rd.
    GatherMask(out, source, mask, true, 70, {1, 2, 4, 0}, kept);
    CHECK(kept == 70);
    const auto got = bench.read(out, 70);
    for (int i = 0; i < 35; ++i) CHECK(got[i] == 2 + 2 * i && got[35 + i] == 34 + 2 * i);
    GatherMask(out, source, mask, false, 0, {1, 2, 8, 0}, kept);  // 256 bytes a repeat
    CHECK(kept == 64 && bench.read(out, 64)[63] == 128);
    auto bits = bench.space<uint8_t>(32);
    CompareScalar(bits, source, 9, CMPMODE::EQ, 64);
    PipeBarrier<PIPE_V>();
    GatherMask(out, source, bits.ReinterpretCast<uint32_t>(), true, 64, {1, 1, 8, 8}, kept);
    CHECK(kept == 1);  // the count is there at once, the mask not before the vector unit is done
    CHECK(bench.read(out, 1)[0] == 9);
    auto none = bench.filled(std::vector<uint32_t>(8, 0));
    GatherMask(out, source, none, true, 64, {1, 1, 8, 8}, kept);
    CHECK(kept == 0);
  });
}

TEST(gather_mask_by_pattern) {
  everywhere([](Bench& bench) {
    auto source = bench.filled(ramp<uint16_t>(128)), out = bench.space<uint16_t>(128);
    const int first[] = {0, 1, 0, 1, 2, 3}, step[] = {2, 2, 4, 4, 4, 4};
    for (uint8_t pattern = 1; pattern <= 6; ++pattern) {
      uint64_t kept = 0;
      GatherMask(out, source, pattern, false, 0, {1, 1, 8, 0}, kept);
      CHECK(kept == static_cast<uint64_t>(128 / step[pattern - 1]));
      CHECK(bench.read(out, kept) == ramp<uint16_t>(kept, first[pattern - 1], step[pattern - 1]));
    }
    uint64_t kept = 0;
    GatherMask(out, source, 7, false, 0, {1, 1, 8, 0}, kept);
    CHECK(kept == 128);
  });
}

TEST(gather_mask_leaves_the_rest_unwritten) {
  for (acpu::Schedule schedule : testing::kSchedules) {
    const acpu::Result result = run(
        [] {
          Bench bench;
          auto source = bench.filled(ramp<int32_t>(64)), out = bench.space<int32_t>(64);
          auto mask = bench.filled(std::vector<uint32_t>(8, 1));
          uint64_t kept = 0;
          GatherMask(out, source, mask, true, 64, {1, 1, 8, 8}, kept);
          CHECK(kept == 2);
          bench.read(out, 3);
        },
        with(schedule));
    CHECK_ONLY(result, kUninitialisedRead);
  }
}

TEST(reductions) {
  everywhere([](Bench& bench) {
    auto source = bench.filled<float>({3, -7, 9, 9, 0, -7, 1, 2, 5, 5});
    auto out = bench.space<float>(8), scratch = bench.space<float>(64);
    ReduceMax(out, source, scratch, 10, true);
    CHECK(bench.read(out, 1)[0] == 9 && bench.read(out.ReinterpretCast<uint32_t>(), 2)[1] == 2);
    ReduceMin(out, source, scratch, 10, true);
    CHECK(bench.read(out, 1)[0] == -7 && bench.read(out.ReinterpretCast<uint32_t>(), 2)[1] == 1);
    ReduceSum(out, source, scratch, 10);
    CHECK(bench.read(out, 1)[0] == 20);
  });
}

TEST(reductions_of_blocks) {
  everywhere([](Bench& bench) {
    auto source = bench.filled(ramp<float>(128)), out = bench.space<float>(16);
    BlockReduceMax(out, source, 2, 64, 1, 1, 8);
    CHECK(bench.read(out, 16) == ramp<float>(16, 7, 8));
    BlockReduceMin(out, source, 2, 64, 1, 1, 8);
    CHECK(bench.read(out, 16) == ramp<float>(16, 0, 8));
    BlockReduceSum(out, source, 1, 12, 1, 1, 8);  // one block and a half
    CHECK(bench.read(out, 2) == (std::vector<float>{28, 38}));
  });
}

TEST(copy_within_the_unified_buffer) {
  everywhere([](Bench& bench) {
    auto source = bench.filled(ramp<int32_t>(16)), out = bench.space<int32_t>(16);
    DataCopy(out, source, 16);
    CHECK(bench.read(out, 16) == ramp<int32_t>(16));
  });
}

TEST(scalar_helpers) {
  CHECK(ScalarGetSFFValue<1>(0) == -1 && ScalarGetSFFValue<1>(8) == 3 && ScalarGetSFFValue<0>(7) == 3);
  CHECK(ScalarGetSFFValue<0>(~uint64_t{0}) == -1);
  CHECK(static_cast<float>(bfloat16_t(1.5f)) == 1.5f);
}

}  // namespace
