// Bounds, capacity and initialisation of the unified buffer and of global memory.
#include "harness.h"

using namespace AscendC;
using testing::Gm;
using testing::run;
using testing::with;

namespace {

constexpr uint32_t kCount = 64;

TEST(capacity_is_that_of_the_hardware) {
  CHECK_CLEAN(run([] {
    TPipe pipe;
    TBuf<TPosition::VECCALC> a, b;
    pipe.InitBuffer(a, 96 * 1024);
    pipe.InitBuffer(b, 96 * 1024);
  }));
  const auto too_much = [] {
    TPipe pipe;
    TQue<TPosition::VECIN, 2> a;
    pipe.InitBuffer(a, 2, 96 * 1024 + 1);
  };
  CHECK_ONLY(run(too_much), kUbCapacity);
  acpu::Options larger;
  larger.ub_bytes = 256 * 1024;
  CHECK_CLEAN(run(too_much, larger));
}

TEST(more_than_64_buffers) {
  CHECK_ONLY(run([] {
               TPipe pipe;
               for (int i = 0; i < 65; ++i) {
                 TBuf<TPosition::VECCALC> buffer;
                 pipe.InitBuffer(buffer, 32);
               }
             }),
             kLimit);
}

TEST(accesses_stay_in_their_tensor) {
  CHECK_ONLY(run([] {
               TPipe pipe;
               TBuf<TPosition::VECCALC> a, b;
               pipe.InitBuffer(a, 256);
               pipe.InitBuffer(b, 256);
               Duplicate(a.Get<int32_t>(), 1, kCount + 8);  // the last 32 bytes are b's
             }),
             kUbOutOfBounds);
  CHECK_ONLY(run([] {
               TPipe pipe;
               TBuf<TPosition::VECCALC> a;
               pipe.InitBuffer(a, 256);
               a.Get<int32_t>().SetValue(kCount, 1);
             }),
             kUbOutOfBounds);
  CHECK_ONLY(run([] {
               TPipe pipe;
               TBuf<TPosition::VECCALC> a;
               pipe.InitBuffer(a, 256);
               Duplicate(a.Get<int32_t>()[8], 1, kCount);
             }),
             kUbOutOfBounds);
  CHECK_ONLY(run([] {  // a part of a buffer is a tensor of its own
               TPipe pipe;
               TBuf<TPosition::VECCALC> a;
               pipe.InitBuffer(a, 256);
               Duplicate(a.Get<int32_t>(32), 1, kCount);
             }),
             kUbOutOfBounds);
  CHECK_ONLY(run([] {
               TPipe pipe;
               TBuf<TPosition::VECCALC> a;
               pipe.InitBuffer(a, 256);
               a.Get<int32_t>(kCount + 1);
             }),
             kUbOutOfBounds);
  CHECK_ONLY(run([] {
               TPipe pipe;
               LocalTensor<int32_t> nothing;
               Duplicate(nothing, 1, kCount);
             }),
             kUseAfterFree);
}

TEST(reads_of_bytes_that_nothing_wrote) {
  CHECK_ONLY(run([] {
               TPipe pipe;
               TBuf<TPosition::VECCALC> a;
               pipe.InitBuffer(a, 256);
               CHECK(a.Get<uint8_t>().GetValue(7) == 0xCB);
             }),
             kUninitialisedRead);
  CHECK_ONLY(run([] {  // 60 of 64 lanes
               TPipe pipe;
               TBuf<TPosition::VECCALC> a;
               pipe.InitBuffer(a, 256);
               Duplicate(a.Get<int32_t>(), 1, 60);
               PipeBarrier<PIPE_V>();
               Adds(a.Get<int32_t>(), a.Get<int32_t>(), 1, kCount);
             }),
             kUninitialisedRead);
  CHECK_CLEAN(run([] {
    TPipe pipe;
    TBuf<TPosition::VECCALC> a;
    pipe.InitBuffer(a, 256);
    Duplicate(a.Get<int32_t>(), 1, 60);
    PipeBarrier<PIPE_V>();
    Adds(a.Get<int32_t>(), a.Get<int32_t>(), 1, 60);
  }));
}

// Copies `count` elements from x[from] to y[to].
acpu::Result move(Gm<int32_t>& x, acpu::RegionUse x_use, uint64_t from, Gm<int32_t>& y, acpu::RegionUse y_use,
                  uint64_t to, uint32_t count, acpu::Schedule schedule = acpu::Schedule::kEager) {
  return acpu::Launch(with(schedule))
      .region(x.data, x.bytes(), x_use, "x")
      .region(y.data, y.bytes(), y_use, "y")
      .run([&] {
        TPipe pipe;
        TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> queue;
        pipe.InitBuffer(queue, 1, 1024);
        auto a = queue.AllocTensor<int32_t>();
        DataCopyPad(a, x.tensor()[from], {1, count * 4, 0, 0, 0}, {false, 0, 0, 0});
        queue.EnQue(a);
        a = queue.DeQue<int32_t>();
        DataCopyPad(y.tensor()[to], a, {1, count * 4, 0, 0, 0});
        queue.FreeTensor(a);
      });
}

TEST(global_memory_is_what_was_registered) {
  using enum acpu::RegionUse;
  for (acpu::Schedule schedule : testing::kSchedules) {
    Gm<int32_t> x(100, 3), y(100);
    CHECK_CLEAN(move(x, kIn, 37, y, kOut, 37, 63, schedule));
    CHECK(y[37] == 3 && y[99] == 3 && y[36] == static_cast<int32_t>(0xCBCBCBCB));
    CHECK_ONLY(move(x, kIn, 38, y, kInOut, 0, 63, schedule), kGmOutOfBounds);
    CHECK_ONLY(move(x, kIn, 0, y, kInOut, 38, 63, schedule), kGmOutOfBounds);
    CHECK_ONLY(move(x, kOut, 0, y, kOut, 0, 63, schedule), kUninitialisedRead);
    CHECK_ONLY(move(x, kIn, 0, y, kIn, 0, 63, schedule), kReadOnlyWrite);
  }
}

TEST(in_out_keeps_its_contents) {
  Gm<int32_t> x(8, 1), y(16, 9);
  CHECK_CLEAN(move(x, acpu::RegionUse::kIn, 0, y, acpu::RegionUse::kInOut, 8, 8));
  CHECK(y[7] == 9 && y[8] == 1);
}

TEST(scalar_accesses_to_global_memory_are_checked) {
  Gm<int32_t> x(16, 5);
  auto launch = [&](acpu::RegionUse use, const std::function<void()>& kernel) {
    return acpu::Launch({}).region(x.data, x.bytes(), use, "x").run(kernel);
  };
  CHECK_CLEAN(launch(acpu::RegionUse::kIn, [&] { CHECK(x.tensor().GetValue(15) == 5); }));
  CHECK_ONLY(launch(acpu::RegionUse::kIn, [&] { x.tensor().GetValue(16); }), kGmOutOfBounds);
  CHECK_ONLY(launch(acpu::RegionUse::kOut, [&] { x.tensor().GetValue(0); }), kUninitialisedRead);
  CHECK_HAS(launch(acpu::RegionUse::kIn, [&] { x.tensor().SetValue(0, 1); }), kReadOnlyWrite);
  const acpu::Result twice = launch(acpu::RegionUse::kOut, [&] {
    x.tensor().GetValue(0);
    x.tensor().GetValue(0);  // reading is not writing
  });
  CHECK(twice.reports.size() == 2);
}

struct Tiling {
  uint32_t rows;
  uint64_t bytes;
};

TEST(tiling_data_and_workspace) {
  Gm<Tiling> tiling(1, {7, 9});
  Gm<uint8_t> workspace(64);
  acpu::Options options;
  options.tiling_key = 3;
  CHECK_CLEAN(acpu::Launch(options)
                  .region(tiling.data, tiling.bytes(), acpu::RegionUse::kIn, "tiling")
                  .region(workspace.data, workspace.bytes(), acpu::RegionUse::kOut, "workspace")
                  .run([&] {
                    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
                    GET_TILING_DATA_WITH_STRUCT(Tiling, data, tiling.data);
                    CHECK(data.rows == 7 && data.bytes == 9);
                    CHECK(GetUserWorkspace(workspace.data) == workspace.data);
                    CHECK(TILING_KEY_IS(3) && !TILING_KEY_IS(4));
                  }));
}

TEST(padding_of_a_block) {
  for (acpu::Schedule schedule : testing::kSchedules) {
    Gm<int16_t> x(64);
    for (size_t i = 0; i < x.size; ++i) x[i] = static_cast<int16_t>(i + 1);
    CHECK_CLEAN(acpu::Launch(with(schedule)).region(x.data, x.bytes(), acpu::RegionUse::kIn, "x").run([&] {
      TPipe pipe;
      TBuf<TPosition::VECCALC> buffer;
      pipe.InitBuffer(buffer, 1024);
      auto a = buffer.Get<int16_t>();
      // Three blocks of five elements, two apart; two elements before, nine behind; a block of 32 bytes between them.
      DataCopyPad(a, x.tensor(), {3, 10, 4, 1, 0}, {true, 2, 9, -1});
      PipeBarrier<PIPE_ALL>();
      for (int16_t row = 0; row < 3; ++row) {
        for (int16_t at = 0; at < 16; ++at) {
          const bool inside = at >= 2 && at < 7;
          CHECK(a.GetValue(row * 32 + at) == (inside ? row * 7 + at - 1 : -1));
        }
      }
    }));
  }
}

TEST(unasked_padding_holds_nothing) {
  Gm<int32_t> x(8, 1);
  for (bool pad : {true, false}) {
    CHECK_ONLY(acpu::Launch({}).region(x.data, x.bytes(), acpu::RegionUse::kIn, "x").run([&] {
      TPipe pipe;
      TBuf<TPosition::VECCALC> buffer;
      pipe.InitBuffer(buffer, 64);
      auto a = buffer.Get<int32_t>();
      DataCopyPad(a, x.tensor(), {1, 20, 0, 0, 0}, {pad, 0, 2, 0});
      PipeBarrier<PIPE_ALL>();
      for (int i = 0; i < (pad ? 8 : 6); ++i) a.GetValue(i);
    }),
               kUninitialisedRead);
  }
}

TEST(strided_copies) {
  for (acpu::Schedule schedule : testing::kSchedules) {
    Gm<int32_t> x(96), y(96);
    for (size_t i = 0; i < x.size; ++i) x[i] = static_cast<int32_t>(i);
    CHECK_CLEAN(acpu::Launch(with(schedule))
                    .region(x.data, x.bytes(), acpu::RegionUse::kIn, "x")
                    .region(y.data, y.bytes(), acpu::RegionUse::kOut, "y")
                    .run([&] {
                      TPipe pipe;
                      TBuf<TPosition::VECCALC> buffer, copy;
                      pipe.InitBuffer(buffer, 512);
                      pipe.InitBuffer(copy, 512);
                      auto a = buffer.Get<int32_t>(), b = copy.Get<int32_t>();
                      DataCopy(a, x.tensor(), {3, 2, 1, 0});  // 16 of every 24 elements, packed
                      PipeBarrier<PIPE_ALL>();
                      CHECK(a.GetValue(16) == 24 && a.GetValue(47) == 63);
                      DataCopy(b, a, {3, 2, 0, 1});
                      PipeBarrier<PIPE_ALL>();
                      CHECK(b.GetValue(24) == 24);
                      DataCopy(y.tensor(), b, {3, 2, 1, 2});
                      DataCopyPad(y.tensor()[80], b, {2, 12, 2, 4, 0});
                    }));
    CHECK(y[0] == 0 && y[15] == 15 && y[32] == 24 && y[64] == 48 && y[79] == 63);
    CHECK(y[80] == 0 && y[82] == 2 && y[83] == static_cast<int32_t>(0xCBCBCBCB) && y[84] == 24 && y[86] == 26);
  }
}

}  // namespace
