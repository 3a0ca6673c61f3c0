// Alignment, limits and overlap of operands. Each rule has a call that obeys it and one that breaks it.
#include "harness.h"

using namespace AscendC;
using testing::Gm;
using testing::run;
using testing::with;

namespace {

constexpr uint32_t kCount = 64;

// Runs `call` on three buffers of 2 KiB that hold zeros.
template <typename T>
acpu::Result on(const std::function<void(LocalTensor<T>, LocalTensor<T>, LocalTensor<T>)>& call) {
  return run([&] {
    TPipe pipe;
    TBuf<TPosition::VECCALC> a, b, c;
    for (TBuf<TPosition::VECCALC>* buffer : {&a, &b, &c}) {
      pipe.InitBuffer(*buffer, 2048);
      Duplicate(buffer->Get<int32_t>(), 0, 512);
    }
    PipeBarrier<PIPE_ALL>();
    call(a.Get<T>(), b.Get<T>(), c.Get<T>());
    PipeBarrier<PIPE_ALL>();
  });
}

using Ints = LocalTensor<int32_t>;
using Floats = LocalTensor<float>;

TEST(vector_operands_start_on_32_bytes) {
  CHECK_CLEAN(on<int32_t>([](Ints a, Ints b, Ints c) { Add(a[8], b[16], c[24], kCount); }));
  CHECK_ONLY(on<int32_t>([](Ints a, Ints b, Ints c) { Add(a[1], b, c, kCount); }), kAlignment);
  CHECK_ONLY(on<int32_t>([](Ints a, Ints b, Ints c) { Add(a, b[4], c, kCount); }), kAlignment);
  CHECK_ONLY(on<int32_t>([](Ints a, Ints b, Ints c) { Add(a, b, c[7], kCount); }), kAlignment);
  CHECK_ONLY(on<int32_t>([](Ints a, Ints b, Ints) { Adds(a, b[2], 1, kCount); }), kAlignment);
  CHECK_ONLY(on<int32_t>([](Ints a, Ints, Ints) { Duplicate(a[2], 1, kCount); }), kAlignment);
  CHECK_ONLY(on<int32_t>([](Ints a, Ints, Ints) {
               auto part = a[2];
               CreateVecIndex(part, 1, kCount);
             }),
             kAlignment);
  CHECK_ONLY(on<int32_t>([](Ints a, Ints b, Ints) { DataCopy(a[2], b, kCount); }), kAlignment);
}

TEST(counts_are_positive) {
  CHECK_ONLY(on<int32_t>([](Ints a, Ints b, Ints c) { Add(a, b, c, 0); }), kLimit);
  CHECK_ONLY(on<int32_t>([](Ints a, Ints b, Ints) { Adds(a, b, 1, -1); }), kLimit);
}

TEST(comparisons_take_256_bytes) {
  CHECK_CLEAN(on<int32_t>([](Ints a, Ints b, Ints c) {
    Compare(a.ReinterpretCast<uint8_t>(), b, c, CMPMODE::EQ, 128);
    CompareScalar(a[32].ReinterpretCast<uint8_t>(), b, 0, CMPMODE::EQ, 64);
  }));
  CHECK_ONLY(on<int32_t>([](Ints a, Ints b, Ints c) { Compare(a.ReinterpretCast<uint8_t>(), b, c, CMPMODE::EQ, 96); }),
             kAlignment);
  CHECK_ONLY(on<float>([](Floats a, Floats b, Floats) {
               CompareScalar(a.ReinterpretCast<uint8_t>(), b, 1.0f, CMPMODE::LT, 72);
             }),
             kAlignment);
}

TEST(int32_compares_by_eq_only) {
  for (CMPMODE mode : {CMPMODE::LT, CMPMODE::GT, CMPMODE::LE, CMPMODE::GE, CMPMODE::NE}) {
    CHECK_ONLY(on<int32_t>([=](Ints a, Ints b, Ints c) { Compare(a.ReinterpretCast<uint8_t>(), b, c, mode, 64); }),
               kLimit);
    CHECK_ONLY(
        on<int32_t>([=](Ints a, Ints b, Ints) { CompareScalar(a.ReinterpretCast<uint8_t>(), b, 1, mode, 64); }), kLimit);
    CHECK_CLEAN(
        on<float>([=](Floats a, Floats b, Floats) { CompareScalar(a.ReinterpretCast<uint8_t>(), b, 1.0f, mode, 64); }));
  }
}

template <typename T>
concept Adds_takes = requires(LocalTensor<T> a) { Adds(a, a, T(), 1); };
template <typename T>
concept And_takes = requires(LocalTensor<T> a) { And(a, a, a, 1); };
template <typename T>
concept Shift_takes = requires(LocalTensor<T> a) { ShiftLeft(a, a, T(), 1); };
template <typename T>
concept Duplicate_takes = requires(LocalTensor<T> a) { Duplicate(a, T(), 1); };
template <typename T>
concept Compare_takes = requires(LocalTensor<uint8_t> d, LocalTensor<T> a) { Compare(d, a, a, CMPMODE::EQ, 64); };
template <typename T>
concept Select_takes = requires(LocalTensor<uint8_t> m, LocalTensor<T> a) {
  Select(a, m, a, a, SELMODE::VSEL_TENSOR_TENSOR_MODE, 64);
};
template <typename T>
concept Gather_takes = requires(LocalTensor<uint32_t> o, LocalTensor<T> a) { Gather(a, a, o, 0, 8); };
template <typename T>
concept Gatherb_takes = requires(LocalTensor<uint32_t> o, LocalTensor<T> a) { Gatherb(a, a, o, 1, {1, 8}); };
template <typename S, typename D>
concept Casts = requires(LocalTensor<D> d, LocalTensor<S> s) { Cast(d, s, RoundMode::CAST_RINT, 8); };

// The types of Atlas A2 and A3.
template <typename T, typename U>
concept Adds_scalar = requires(LocalTensor<T> a, U scalar) { Adds(a, a, scalar, 1); };
static_assert(Adds_scalar<int32_t, int32_t> && !Adds_scalar<float, int32_t> && !Adds_scalar<half, float>);
static_assert(Adds_takes<int16_t> && Adds_takes<int32_t> && Adds_takes<half> && Adds_takes<float>);
static_assert(!Adds_takes<uint32_t> && !Adds_takes<uint8_t> && !Adds_takes<int64_t>);
static_assert(And_takes<int16_t> && And_takes<uint16_t> && !And_takes<int32_t> && !And_takes<uint8_t>);
static_assert(Shift_takes<int16_t> && Shift_takes<uint16_t> && Shift_takes<int32_t> && Shift_takes<uint32_t>);
static_assert(!Shift_takes<uint8_t> && !Shift_takes<int64_t>);
static_assert(Duplicate_takes<bfloat16_t> && Duplicate_takes<uint32_t> && !Duplicate_takes<uint8_t>);
static_assert(Compare_takes<int32_t> && Compare_takes<float> && !Compare_takes<int16_t> && !Compare_takes<uint32_t>);
static_assert(Select_takes<half> && Select_takes<float> && !Select_takes<int32_t>);
static_assert(Gather_takes<int32_t> && Gather_takes<half> && !Gather_takes<uint8_t> && !Gather_takes<int64_t>);
static_assert(Gatherb_takes<uint32_t> && Gatherb_takes<uint16_t> && !Gatherb_takes<int32_t>);
static_assert(Casts<float, int32_t> && Casts<int32_t, float> && Casts<half, uint8_t> && !Casts<int32_t, uint8_t>);
static_assert(!Casts<uint32_t, float> && !Casts<int32_t, int32_t>);

TEST(operands_are_the_same_or_apart) {
  CHECK_CLEAN(on<int32_t>([](Ints a, Ints b, Ints) { Add(a, a, b, kCount); }));
  CHECK_CLEAN(on<int32_t>([](Ints a, Ints b, Ints) { Add(a, a[64], b, kCount); }));
  CHECK_ONLY(on<int32_t>([](Ints a, Ints b, Ints) { Add(a, a[8], b, kCount); }), kOverlap);
  CHECK_ONLY(on<int32_t>([](Ints a, Ints b, Ints) { Add(a, b, a[56], kCount); }), kOverlap);
  CHECK_ONLY(on<int32_t>([](Ints a, Ints, Ints) { Adds(a[8], a, 1, kCount); }), kOverlap);
  CHECK_ONLY(on<int32_t>([](Ints a, Ints, Ints) { Cast(a, a.ReinterpretCast<int64_t>(), RoundMode::CAST_NONE, 64); }),
             kOverlap);
  CHECK_ONLY(on<int32_t>([](Ints a, Ints b, Ints) { Compare(a.ReinterpretCast<uint8_t>(), a, b, CMPMODE::EQ, 64); }),
             kOverlap);
  CHECK_ONLY(on<int32_t>([](Ints a, Ints, Ints) { Brcb(a, a, 1, {1, 8}); }), kOverlap);
  CHECK_ONLY(on<uint32_t>([](auto a, auto, auto c) { Gatherb(a, a, c, 1, {1, 8}); }), kOverlap);
}

TEST(shift_distances) {
  CHECK_CLEAN(on<int32_t>([](Ints a, Ints, Ints) { ShiftLeft(a, a, 32, kCount); }));
  CHECK_ONLY(on<int32_t>([](Ints a, Ints, Ints) { ShiftLeft(a, a, 33, kCount); }), kLimit);
  CHECK_ONLY(on<int32_t>([](Ints a, Ints, Ints) { ShiftRight(a, a, -1, kCount); }), kLimit);
}

TEST(casts_to_integers_round) {
  CHECK_ONLY(on<float>([](Floats a, Floats, Floats) {
               Cast(a.ReinterpretCast<int32_t>(), a, RoundMode::CAST_NONE, kCount);
             }),
             kLimit);
}

TEST(select_needs_8_kib_to_spare) {
  for (uint32_t spare : {8192u, 8160u}) {
    const acpu::Result result = run([=] {
      TPipe pipe;
      TBuf<TPosition::VECCALC> a, rest;
      pipe.InitBuffer(a, 1024);
      pipe.InitBuffer(rest, 192 * 1024 - 1024 - spare);
      Duplicate(a.Get<float>(), 0.0f, 256);
      PipeBarrier<PIPE_V>();
      auto mask = a.Get<uint8_t>();
      auto data = a.Get<float>()[64];
      Select(data, mask, data, 1.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, 64);
    });
    if (spare == 8192) {
      CHECK_CLEAN(result);
    } else {
      CHECK_ONLY(result, kUbCapacity);
    }
  }
}

TEST(select_modes) {
  CHECK_ONLY(on<float>([](Floats a, Floats b, Floats c) {
               Select(a, c.ReinterpretCast<uint8_t>(), b, b, SELMODE::VSEL_CMPMASK_SPR, 64);
             }),
             kLimit);
  CHECK_ONLY(on<float>([](Floats a, Floats b, Floats c) {
               Select(a, c.ReinterpretCast<uint8_t>(), b, 1.0f, SELMODE::VSEL_TENSOR_TENSOR_MODE, 64);
             }),
             kLimit);
}

TEST(gather_offsets) {
  const auto gather = [](uint32_t offset, uint32_t base) {
    return on<int32_t>([=](Ints a, Ints b, Ints c) {
      auto offsets = c.ReinterpretCast<uint32_t>();
      offsets.SetValue(0, offset);
      PipeBarrier<PIPE_ALL>();
      Gather(a, b, offsets, base, 8);
    });
  };
  CHECK_CLEAN(gather(2044, 0));
  CHECK_ONLY(gather(2044, 4), kUbOutOfBounds);
  CHECK_ONLY(gather(2, 0), kAlignment);
  const auto blocks = [](uint32_t offset) {
    return on<uint32_t>([=](auto a, auto b, auto c) {
      c.SetValue(3, offset);
      PipeBarrier<PIPE_ALL>();
      Gatherb(a, b, c, 1, {1, 8});
    });
  };
  CHECK_CLEAN(blocks(2016));
  CHECK_ONLY(blocks(2048), kUbOutOfBounds);
  CHECK_ONLY(blocks(16), kAlignment);
}

TEST(gathered_elements_are_written_before) {
  CHECK_ONLY(run([] {
               TPipe pipe;
               TBuf<TPosition::VECCALC> source, offsets, out;
               pipe.InitBuffer(source, 256);
               pipe.InitBuffer(offsets, 32);
               pipe.InitBuffer(out, 32);
               Duplicate(source.Get<int32_t>(), 1, 8);
               Duplicate(offsets.Get<int32_t>(), 32, 8);
               PipeBarrier<PIPE_V>();
               Gather(out.Get<int32_t>(), source.Get<int32_t>(), offsets.Get<uint32_t>(), 0, 8);
             }),
             kUninitialisedRead);
}

TEST(gather_mask_limits) {
  uint64_t kept = 0;
  CHECK_ONLY(on<int32_t>([&](Ints a, Ints b, Ints) { GatherMask(a, b, 0, false, 0, {1, 1, 8, 0}, kept); }), kLimit);
  CHECK_ONLY(on<int32_t>([&](Ints a, Ints b, Ints) { GatherMask(a, b, 8, false, 0, {1, 1, 8, 0}, kept); }), kLimit);
  CHECK_ONLY(on<int32_t>([&](Ints a, Ints b, Ints) { GatherMask(a, b, 7, true, 0, {1, 1, 8, 0}, kept); }), kLimit);
  CHECK_ONLY(on<int32_t>([&](Ints a, Ints b, Ints) { GatherMask(a, b, 7, true, 513, {1, 1, 8, 0}, kept); }),
             kUbOutOfBounds);
}

TEST(reductions_keep_their_rules) {
  CHECK_CLEAN(on<float>([](Floats a, Floats b, Floats c) { ReduceMax(a[2], b, c, 512); }));
  CHECK_ONLY(on<float>([](Floats a, Floats b, Floats c) { ReduceMax(a[1], b, c, 512); }), kAlignment);
  CHECK_ONLY(on<float>([](Floats a, Floats b, Floats c) { ReduceMax(a, b, c[504], 512, true); }), kUbOutOfBounds);
  CHECK_ONLY(on<float>([](Floats a, Floats b, Floats) { BlockReduceMax(a[4], b, 1, 64, 1, 1, 8); }), kAlignment);
  CHECK_ONLY(on<float>([](Floats a, Floats b, Floats) { BlockReduceMax(a, b, 1, 65, 1, 1, 8); }), kLimit);
  CHECK_ONLY(on<float>([](Floats a, Floats b, Floats) { BlockReduceMax(a, b, 256, 1, 0, 0, 0); }), kLimit);
}

// One copy from x, at byte `offset`, into a buffer of 1 KiB.
acpu::Result load(const std::function<void(LocalTensor<int32_t>, GlobalTensor<int32_t>)>& call, uint32_t offset = 0) {
  Gm<uint8_t> x(4096, 1);
  return acpu::Launch({}).region(x.data, x.bytes(), acpu::RegionUse::kInOut, "x").run([&] {
    TPipe pipe;
    TBuf<TPosition::VECCALC> buffer;
    pipe.InitBuffer(buffer, 1024);
    Duplicate(buffer.Get<int32_t>(), 0, 256);
    PipeBarrier<PIPE_ALL>();
    GlobalTensor<int32_t> global;
    global.SetGlobalBuffer(reinterpret_cast<int32_t*>(x.data + offset));
    call(buffer.Get<int32_t>(), global);
  });
}

using Global = GlobalTensor<int32_t>;

TEST(data_copy_moves_blocks) {
  CHECK_CLEAN(load([](Ints a, Global x) { DataCopy(a, x, 64); }));
  CHECK_CLEAN(load([](Ints a, Global x) { DataCopy(x[3], a, 64); }));  // global memory: by the element
  CHECK_ONLY(load([](Ints a, Global x) { DataCopy(a, x, 60); }), kAlignment);
  CHECK_ONLY(load([](Ints a, Global x) { DataCopy(x, a, 60); }), kAlignment);
  CHECK_ONLY(load([](Ints a, Global x) { DataCopy(a[1], x, 64); }), kAlignment);
  CHECK_ONLY(load([](Ints a, Global x) { DataCopy(x, a[1], 64); }), kAlignment);
  CHECK_ONLY(load([](Ints a, Global x) { DataCopy(a, x, 64); }, 2), kAlignment);
  CHECK_HAS(load([](Ints a, Global x) { DataCopy(a, x, {4096, 1, 0, 0}); }), kLimit);
}

TEST(data_copy_pad_limits) {
  CHECK_CLEAN(load([](Ints a, Global x) { DataCopyPad(a, x, {1, 60, 0, 0, 0}, {true, 0, 1, 0}); }));
  CHECK_CLEAN(load([](Ints a, Global x) { DataCopyPad(a, x, {1, 60, 0, 0, 0}, {false, 0, 0, 0}); }, 2));
  CHECK_CLEAN(load([](Ints a, Global x) { DataCopyPad(x[1], a, {2, 4, 0, 0, 0}); }));
  CHECK_ONLY(load([](Ints a, Global x) { DataCopyPad(a[1], x, {1, 60, 0, 0, 0}, {false, 0, 0, 0}); }), kAlignment);
  CHECK_ONLY(load([](Ints a, Global x) { DataCopyPad(x, a[1], {1, 60, 0, 0, 0}); }), kAlignment);
  CHECK_ONLY(load([](Ints a, Global x) { DataCopyPad(x, a, {1, 61, 0, 0, 0}); }), kAlignment);
  CHECK_ONLY(load([](Ints a, Global x) { DataCopyPad(x, a, {0, 60, 0, 0, 0}); }), kLimit);
  CHECK_ONLY(load([](Ints a, Global x) { DataCopyPad(x, a, {1, 0, 0, 0, 0}); }), kLimit);
  CHECK_HAS(load([](Ints a, Global x) { DataCopyPad(x, a, {4096, 4, 0, 0, 0}); }), kLimit);
  CHECK_ONLY(load([](Ints a, Global x) { DataCopyPad(a, x, {1, 4, 0, 0, 0}, {true, 0, 9, 0}); }), kLimit);
}

}  // namespace
