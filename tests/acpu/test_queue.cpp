// TPipe, TQue and TBuf: what they order, and their misuse.
#include "harness.h"

using namespace AscendC;
using testing::Gm;
using testing::run;
using testing::with;

namespace {

constexpr uint32_t kCount = 64;
constexpr uint32_t kTiles = 6;

// y = x + 1 in tiles, with double buffers on both sides.
void add_one(const GlobalTensor<int32_t>& x, const GlobalTensor<int32_t>& y) {
  TPipe pipe;
  TQue<TPosition::VECIN, 1> in;
  TQue<TPosition::VECOUT, 1> out;
  pipe.InitBuffer(in, 2, kCount * 4);
  pipe.InitBuffer(out, 2, kCount * 4);
  for (uint32_t tile = 0; tile < kTiles; ++tile) {
    auto a = in.AllocTensor<int32_t>();
    DataCopy(a, x[tile * kCount], kCount);
    in.EnQue(a);
    a = in.DeQue<int32_t>();
    auto b = out.AllocTensor<int32_t>();
    Adds(b, a, 1, kCount);
    in.FreeTensor(a);
    out.EnQue(b);
    b = out.DeQue<int32_t>();
    DataCopy(y[tile * kCount], b, kCount);
    out.FreeTensor(b);
  }
}

// A pure copy through one queue that MTE2 fills and MTE3 empties.
void copy(const GlobalTensor<int32_t>& x, const GlobalTensor<int32_t>& y) {
  TPipe pipe;
  TQueBind<TPosition::VECIN, TPosition::VECOUT, 2> queue;
  pipe.InitBuffer(queue, 2, kCount * 4);
  for (uint32_t tile = 0; tile < kTiles; ++tile) {
    auto a = queue.AllocTensor<int32_t>();
    DataCopy(a, x[tile * kCount], kCount);
    queue.EnQue(a);
    a = queue.DeQue<int32_t>();
    DataCopy(y[tile * kCount], a, kCount);
    queue.FreeTensor(a);
  }
}

using Kernel = void (*)(const GlobalTensor<int32_t>&, const GlobalTensor<int32_t>&);

acpu::Result launch(Kernel kernel, Gm<int32_t>& x, Gm<int32_t>& y, const acpu::Options& options) {
  return acpu::Launch(options)
      .region(x.data, x.bytes(), acpu::RegionUse::kIn, "x")
      .region(y.data, y.bytes(), acpu::RegionUse::kOut, "y")
      .run([&] { kernel(x.tensor(), y.tensor()); });
}

bool correct(Gm<int32_t>& y, int32_t added) {
  bool ok = true;
  for (size_t i = 0; i < y.size; ++i) ok &= y[i] == static_cast<int32_t>(i) + added;
  return ok;
}

// Every queue call in turn loses its effect; each must be reported, and change the result under one schedule.
void drop_each(Kernel kernel, int32_t added, size_t sites) {
  Gm<int32_t> x(kTiles * kCount), y(kTiles * kCount);
  for (size_t i = 0; i < x.size; ++i) x[i] = static_cast<int32_t>(i);
  const acpu::Result whole = launch(kernel, x, y, {});
  CHECK_CLEAN(whole);
  CHECK(whole.sync_sites.size() == sites);
  for (const acpu::SyncSite& dropped : whole.sync_sites) {
    bool wrong = false;
    for (acpu::Schedule schedule : testing::kSchedules) {
      acpu::Options options = with(schedule);
      options.drop = {dropped.site.key()};
      const acpu::Result result = launch(kernel, x, y, options);
      CHECK_ONLY(result, kRace);
      CHECK(result.completed);
      wrong |= !correct(y, added);
    }
    if (!wrong) testing::fail(__FILE__, __LINE__, "no wrong result without " + dropped.site.api);
  }
}

TEST(queues_order_their_pipes) {
  for (Kernel kernel : {&add_one, &copy}) {
    for (acpu::Schedule schedule : testing::kSchedules) {
      Gm<int32_t> x(kTiles * kCount), y(kTiles * kCount);
      for (size_t i = 0; i < x.size; ++i) x[i] = static_cast<int32_t>(i);
      CHECK_CLEAN(launch(kernel, x, y, with(schedule)));
      CHECK(correct(y, kernel == &add_one));
    }
  }
}

TEST(every_queue_call_counts) {
  drop_each(&add_one, 1, 8);
  drop_each(&copy, 0, 4);
}

TEST(a_queue_does_not_order_the_scalar_unit) {
  Gm<int32_t> x(kCount, 1);
  CHECK_ONLY(acpu::Launch({}).region(x.data, x.bytes(), acpu::RegionUse::kIn, "x").run([&] {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> in;
    pipe.InitBuffer(in, 1, kCount * 4);
    auto a = in.AllocTensor<int32_t>();
    DataCopy(a, x.tensor(), kCount);
    in.EnQue(a);
    a = in.DeQue<int32_t>();
    a.GetValue(0);
    in.FreeTensor(a);
  }),
             kRace);
}

TEST(queue_misuse) {
  CHECK_ONLY(run([] {  // a third tensor of two buffers
               TPipe pipe;
               TQue<TPosition::VECIN, 1> in;
               pipe.InitBuffer(in, 2, 64);
               for (int i = 0; i < 3; ++i) in.AllocTensor<int32_t>();
             }),
             kQueue);
  CHECK_ONLY(run([] {  // DeQue of an empty queue
               TPipe pipe;
               TQue<TPosition::VECIN, 1> in;
               pipe.InitBuffer(in, 2, 64);
               in.DeQue<int32_t>();
             }),
             kQueue);
  CHECK_ONLY(run([] {  // never freed
               TPipe pipe;
               TQue<TPosition::VECIN, 1> in;
               pipe.InitBuffer(in, 2, 64);
               in.AllocTensor<int32_t>();
             }),
             kQueue);
  CHECK_ONLY(run([] {  // never dequeued
               TPipe pipe;
               TQue<TPosition::VECIN, 1> in;
               pipe.InitBuffer(in, 2, 64);
               in.EnQue(in.AllocTensor<int32_t>());
             }),
             kQueue);
  CHECK_ONLY(run([] {  // no InitBuffer
               TPipe pipe;
               TQue<TPosition::VECIN, 1> in;
               in.AllocTensor<int32_t>();
             }),
             kQueue);
  CHECK_ONLY(run([] { TPipe one, two; }), kQueue);
  CHECK_ONLY(run([] { GetTPipePtr()->FetchEventID(HardEvent::V_S); }), kQueue);
}

TEST(queued_tensor_misuse) {
  CHECK_ONLY(run([] {  // two EnQue at depth 1
               TPipe pipe;
               TQue<TPosition::VECIN, 1> in;
               pipe.InitBuffer(in, 2, 64);
               for (int i = 0; i < 2; ++i) in.EnQue(in.AllocTensor<int32_t>());
               for (int i = 0; i < 2; ++i) {
                 auto a = in.DeQue<int32_t>();
                 in.FreeTensor(a);
               }
             }),
             kQueue);
  CHECK_ONLY(run([] {  // enqueued twice
               TPipe pipe;
               TQue<TPosition::VECIN, 2> in;
               pipe.InitBuffer(in, 2, 64);
               auto a = in.AllocTensor<int32_t>();
               in.EnQue(a);
               in.EnQue(a);
               a = in.DeQue<int32_t>();
               in.FreeTensor(a);
             }),
             kQueue);
  CHECK_ONLY(run([] {  // freed while queued
               TPipe pipe;
               TQue<TPosition::VECIN, 1> in;
               pipe.InitBuffer(in, 1, 64);
               auto a = in.AllocTensor<int32_t>();
               in.EnQue(a);
               in.FreeTensor(a);
               a = in.DeQue<int32_t>();
               in.FreeTensor(a);
             }),
             kQueue);
  CHECK_ONLY(run([] {  // a tensor of another queue
               TPipe pipe;
               TQue<TPosition::VECIN, 1> in, other;
               pipe.InitBuffer(in, 1, 64);
               pipe.InitBuffer(other, 1, 64);
               auto a = in.AllocTensor<int32_t>();
               other.EnQue(a);
               in.FreeTensor(a);
             }),
             kQueue);
}

TEST(a_queue_of_one_pipe_orders_nothing) {
  for (bool barrier : {true, false}) {
    const acpu::Result result = run([=] {
      TPipe pipe;
      TQue<TPosition::VECCALC, 1> queue;
      pipe.InitBuffer(queue, 1, 256);
      auto a = queue.AllocTensor<int32_t>();
      Duplicate(a, 1, kCount);
      queue.EnQue(a);
      a = queue.DeQue<int32_t>();
      if (barrier) PipeBarrier<PIPE_V>();
      Adds(a, a, 1, kCount);
      queue.FreeTensor(a);
    });
    if (barrier) {
      CHECK_CLEAN(result);
    } else {
      CHECK_ONLY(result, kRace);
    }
  }
  CHECK_ONLY(run([] {  // nor does a buffer's next turn
               TPipe pipe;
               TQue<TPosition::VECCALC, 1> queue;
               pipe.InitBuffer(queue, 1, 256);
               for (int round = 0; round < 2; ++round) {
                 auto a = queue.AllocTensor<int32_t>();
                 Duplicate(a, 1, kCount);
                 queue.FreeTensor(a);
               }
             }),
             kRace);
}

TEST(buffers_take_turns) {
  CHECK_CLEAN(run([] {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> in;
    pipe.InitBuffer(in, 2, 64);
    auto a = in.AllocTensor<int32_t>();
    const uint32_t first = a.acpu_address();
    in.FreeTensor(a);
    a = in.AllocTensor<int32_t>();
    CHECK(a.acpu_address() != first);
    in.FreeTensor(a);
  }));
}

TEST(depth_two_takes_two) {
  CHECK_CLEAN(run([] {
    TPipe pipe;
    TQue<TPosition::VECIN, 2> in;
    pipe.InitBuffer(in, 2, 64);
    CHECK(in.HasIdleBuffer() && in.VacantInQue() && !in.HasTensorInQue());
    for (int i = 0; i < 2; ++i) in.EnQue(in.AllocTensor<int32_t>());
    CHECK(!in.HasIdleBuffer() && !in.VacantInQue() && in.GetTensorCountInQue() == 2);
    for (int i = 0; i < 2; ++i) {
      auto a = in.DeQue<int32_t>();
      in.FreeTensor(a);
    }
  }));
}

TEST(a_freed_tensor_is_gone) {
  CHECK_ONLY(run([] {
               TPipe pipe;
               TQue<TPosition::VECCALC, 1> queue;
               pipe.InitBuffer(queue, 1, 256);
               auto a = queue.AllocTensor<int32_t>();
               const auto kept = a;
               queue.FreeTensor(a);
               Duplicate(kept, 1, kCount);
             }),
             kUseAfterFree);
  CHECK_ONLY(run([] {  // freed twice
               TPipe pipe;
               TQue<TPosition::VECIN, 1> queue;
               pipe.InitBuffer(queue, 1, 256);
               auto a = queue.AllocTensor<int32_t>();
               queue.FreeTensor(a);
               queue.FreeTensor(a);
             }),
             kUseAfterFree);
  CHECK_ONLY(run([] {  // what it held is gone too
               TPipe pipe;
               TQue<TPosition::VECCALC, 1> queue;
               pipe.InitBuffer(queue, 1, 256);
               auto a = queue.AllocTensor<int32_t>();
               Duplicate(a, 1, kCount);
               queue.FreeTensor(a);
               PipeBarrier<PIPE_V>();
               a = queue.AllocTensor<int32_t>();
               Adds(a, a, 1, kCount);
               queue.FreeTensor(a);
             }),
             kUninitialisedRead);
}

TEST(reset_gives_the_buffer_back) {
  for (acpu::Schedule schedule : testing::kSchedules) {
    for (bool barrier : {true, false}) {
      const acpu::Result result = run(
          [=] {
            TPipe pipe;
            for (int round = 0; round < 3; ++round) {
              TBuf<TPosition::VECCALC> buffer;
              pipe.InitBuffer(buffer, 150 * 1024);
              Duplicate(buffer.Get<int32_t>(), round, kCount);
              if (barrier) PipeBarrier<PIPE_V>();
              pipe.Reset();
            }
          },
          with(schedule));
      if (barrier) {
        CHECK_CLEAN(result);
      } else {
        CHECK_ONLY(result, kRace);  // Reset waits for no pipe
      }
    }
  }
  CHECK_ONLY(run([] {
               TPipe pipe;
               TBuf<TPosition::VECCALC> buffer;
               pipe.InitBuffer(buffer, 256);
               auto old = buffer.Get<int32_t>();
               pipe.Reset();
               Duplicate(old, 1, kCount);
             }),
             kUseAfterFree);
  CHECK_ONLY(run([] {  // what the buffer held is gone
               TPipe pipe;
               for (int round = 0; round < 2; ++round) {
                 TBuf<TPosition::VECCALC> buffer;
                 pipe.InitBuffer(buffer, 256);
                 auto a = buffer.Get<int32_t>();
                 if (round == 0) Duplicate(a, 1, kCount);
                 PipeBarrier<PIPE_ALL>();
                 if (round == 1) a.GetValue(0);
                 pipe.Reset();
               }
             }),
             kUninitialisedRead);
  CHECK_CLEAN(run([] {  // one TPipe after the other: its end waits for all pipes
    for (int round = 0; round < 2; ++round) {
      TPipe pipe;
      TBuf<TPosition::VECCALC> buffer;
      pipe.InitBuffer(buffer, 150 * 1024);
      Duplicate(buffer.Get<int32_t>(), round, kCount);
      CHECK(GetTPipePtr() == &pipe);
    }
  }));
}

TEST(reset_waits_for_freed_tensors) {
  Gm<int32_t> x(kCount, 1);
  CHECK_CLEAN(acpu::Launch({}).region(x.data, x.bytes(), acpu::RegionUse::kIn, "x").run([&] {
    TPipe pipe;
    for (int round = 0; round < 2; ++round) {
      TQue<TPosition::VECIN, 1> in;
      TBuf<TPosition::VECCALC> out;
      pipe.InitBuffer(in, 1, kCount * 4);
      pipe.InitBuffer(out, kCount * 4);
      auto a = in.AllocTensor<int32_t>();
      DataCopy(a, x.tensor(), kCount);
      in.EnQue(a);
      a = in.DeQue<int32_t>();
      Adds(out.Get<int32_t>(), a, 1, kCount);
      in.FreeTensor(a);
      PipeBarrier<PIPE_V>();  // for out, which no queue looks after
      pipe.Reset();
    }
  }));
}

TEST(reset_takes_event_ids_back) {
  CHECK_CLEAN(run([] {
    TPipe pipe;
    for (int round = 0; round < 3; ++round) {
      for (int i = 0; i < 8; ++i) CHECK(pipe.AllocEventID<HardEvent::V_MTE3>() == i);
      pipe.Reset();
    }
  }));
  CHECK_ONLY(run([] {
               TPipe pipe;
               const TEventID id = pipe.AllocEventID<HardEvent::V_MTE3>();
               pipe.Reset();
               SetFlag<HardEvent::V_MTE3>(id);
               WaitFlag<HardEvent::V_MTE3>(id);
             }),
             kEventId);
}

TEST(tensor_views) {
  CHECK_CLEAN(run([] {
    TPipe pipe;
    TBuf<TPosition::VECCALC> buffer;
    pipe.InitBuffer(buffer, 100);  // rounded up to 128
    auto words = buffer.Get<int32_t>();
    CHECK(words.GetSize() == 32 && words.GetPosition() == TPosition::VECCALC);
    CHECK(buffer.Get<int32_t>(10).GetSize() == 10);
    words.SetValue(8, 0x01020304);
    CHECK(words[8].GetSize() == 24 && words[8].GetValue(0) == 0x01020304);
    auto bytes = words.ReinterpretCast<uint8_t>();
    CHECK(bytes.GetSize() == 128 && bytes.GetValue(32) == 4 && bytes.GetValue(35) == 1);
    CHECK(words[8].ReinterpretCast<uint16_t>().GetValue(1) == 0x0102);
    CHECK((buffer.GetWithOffset<int32_t>(8, 32).GetValue(0)) == 0x01020304);
  }));
}

}  // namespace
