// Ordering inside a core: flags, barriers, queues. Each rule has a kernel that obeys it and one that breaks it.
#include "harness.h"

using namespace AscendC;
using testing::Gm;
using testing::run;
using testing::with;

namespace {

constexpr uint32_t kCount = 64;
constexpr uint32_t kBytes = kCount * 4;

template <HardEvent event>
void order() {
  const TEventID id = GetTPipePtr()->FetchEventID(event);
  SetFlag<event>(id);
  WaitFlag<event>(id);
}

// Copies in, adds one, copies out; `fenced` says which of the two flags are there.
struct CopyKernel {
  bool in_to_vector = true;
  bool vector_to_out = true;

  acpu::Result operator()(Gm<int32_t>& x, Gm<int32_t>& y, acpu::Options options) const {
    return acpu::Launch(options)
        .region(x.data, x.bytes(), acpu::RegionUse::kIn, "x")
        .region(y.data, y.bytes(), acpu::RegionUse::kOut, "y")
        .run([&] {
          TPipe pipe;
          TBuf<TPosition::VECCALC> buffer;
          pipe.InitBuffer(buffer, kBytes);
          auto tensor = buffer.Get<int32_t>();
          DataCopy(tensor, x.tensor(), kCount);
          if (in_to_vector) order<HardEvent::MTE2_V>();
          Adds(tensor, tensor, 1, kCount);
          if (vector_to_out) order<HardEvent::V_MTE3>();
          DataCopy(y.tensor(), tensor, kCount);
        });
  }
};

TEST(ordered_pipes_are_clean) {
  for (acpu::Schedule schedule : testing::kSchedules) {
    Gm<int32_t> x(kCount, 41), y(kCount);
    CHECK_CLEAN(CopyKernel{}(x, y, with(schedule)));
    CHECK(y[0] == 42 && y[kCount - 1] == 42);
  }
}

TEST(missing_mte2_v_is_a_race_and_changes_the_result) {
  for (acpu::Schedule schedule : testing::kSchedules) {
    Gm<int32_t> x(kCount, 41), y(kCount);
    const acpu::Result result = CopyKernel{.in_to_vector = false}(x, y, with(schedule));
    CHECK_ONLY(result, kRace);
    CHECK((y[0] == 42) == (schedule != acpu::Schedule::kLazy));
    CHECK(result.reports[0].site.api == "Adds" && result.reports[0].other.api == "DataCopy");
    CHECK(result.reports[0].site.line != result.reports[0].other.line);
    // Accesses ordered after the second one are not reported against the first.
    CHECK(result.reports.size() == 1);
  }
}

TEST(missing_v_mte3_is_a_race_and_changes_the_result) {
  for (acpu::Schedule schedule : testing::kSchedules) {
    Gm<int32_t> x(kCount, 41), y(kCount);
    CHECK_ONLY((CopyKernel{.vector_to_out = false}(x, y, with(schedule))), kRace);
    CHECK((y[0] == 42) == (schedule != acpu::Schedule::kLazy));
  }
}

// A second load into a buffer that a vector instruction still reads.
acpu::Result overwrite(Gm<int32_t>& x, Gm<int32_t>& y, bool fenced, acpu::Schedule schedule) {
  return acpu::Launch(with(schedule))
      .region(x.data, x.bytes(), acpu::RegionUse::kIn, "x")
      .region(y.data, y.bytes(), acpu::RegionUse::kOut, "y")
      .run([&] {
        TPipe pipe;
        TBuf<TPosition::VECCALC> in, out;
        pipe.InitBuffer(in, kBytes);
        pipe.InitBuffer(out, kBytes);
        DataCopy(in.Get<int32_t>(), x.tensor(), kCount);
        order<HardEvent::MTE2_V>();
        Adds(out.Get<int32_t>(), in.Get<int32_t>(), 1, kCount);
        if (fenced) {
          order<HardEvent::V_MTE2>();
        } else {
          PipeBarrier<PIPE_MTE2>();
        }
        DataCopy(in.Get<int32_t>(), x.tensor()[kCount], kCount);
        order<HardEvent::V_MTE3>();
        DataCopy(y.tensor(), out.Get<int32_t>(), kCount);
      });
}

TEST(write_after_read_needs_the_backward_flag) {
  for (acpu::Schedule schedule : testing::kSchedules) {
    Gm<int32_t> x(2 * kCount, 7), y(kCount);
    for (size_t i = 0; i < kCount; ++i) x[i] = 3;
    CHECK_CLEAN(overwrite(x, y, true, schedule));
    CHECK(y[0] == 4);
    CHECK_ONLY(overwrite(x, y, false, schedule), kRace);
    CHECK(y[0] == (schedule == acpu::Schedule::kLazyReverse ? 8 : 4));
  }
}

// Two dependent vector instructions; what they leave is read by the scalar unit.
acpu::Result two_adds(int32_t& seen, bool barrier, acpu::Schedule schedule) {
  return run(
      [&] {
        TPipe pipe;
        TBuf<TPosition::VECCALC> a, b;
        pipe.InitBuffer(a, kBytes);
        pipe.InitBuffer(b, kBytes);
        Duplicate(a.Get<int32_t>(), 1, kCount);
        PipeBarrier<PIPE_V>();
        Adds(b.Get<int32_t>(), a.Get<int32_t>(), 1, kCount);
        if (barrier) PipeBarrier<PIPE_V>();
        Muls(a.Get<int32_t>(), b.Get<int32_t>(), 10, kCount);
        order<HardEvent::V_S>();
        seen = a.Get<int32_t>().GetValue(0);
      },
      with(schedule));
}

TEST(dependent_vector_instructions_need_a_barrier) {
  for (acpu::Schedule schedule : testing::kSchedules) {
    int32_t seen = 0;
    CHECK_CLEAN(two_adds(seen, true, schedule));
    CHECK(seen == 20);
    const acpu::Result result = two_adds(seen, false, schedule);
    CHECK_HAS(result, kRace);
    CHECK((seen == 20) == (schedule == acpu::Schedule::kEager));
  }
}

TEST(a_barrier_orders_its_own_pipe_only) {
  CHECK_ONLY(run([] {
               TPipe pipe;
               TBuf<TPosition::VECCALC> a;
               pipe.InitBuffer(a, kBytes);
               Duplicate(a.Get<int32_t>(), 1, kCount);
               PipeBarrier<PIPE_V>();
               a.Get<int32_t>().GetValue(0);
             }),
             kRace);
}

TEST(pipe_all_orders_everything) {
  for (acpu::Schedule schedule : testing::kSchedules) {
    int32_t seen = 0;
    CHECK_CLEAN(run(
        [&] {
          TPipe pipe;
          TBuf<TPosition::VECCALC> a;
          pipe.InitBuffer(a, kBytes);
          Duplicate(a.Get<int32_t>(), 5, kCount);
          PipeBarrier<PIPE_ALL>();
          seen = a.Get<int32_t>().GetValue(3);
        },
        with(schedule)));
    CHECK(seen == 5);
  }
}

TEST(pipe_barrier_s_is_an_error) {
  CHECK_ONLY(run([] { PipeBarrier<PIPE_S>(); }), kLimit);
}

TEST(scalar_and_vector_need_flags_both_ways) {
  for (acpu::Schedule schedule : testing::kSchedules) {
    for (int missing = 0; missing < 3; ++missing) {
      int32_t seen = 0;
      const acpu::Result result = run(
          [&] {
            TPipe pipe;
            TBuf<TPosition::VECCALC> a;
            pipe.InitBuffer(a, kBytes);
            auto tensor = a.Get<int32_t>();
            for (uint32_t i = 0; i < kCount; ++i) tensor.SetValue(i, 1);
            if (missing != 1) order<HardEvent::S_V>();
            Adds(tensor, tensor, 1, kCount);
            if (missing != 2) order<HardEvent::V_S>();
            seen = tensor.GetValue(0);
          },
          with(schedule));
      if (missing == 0) {
        CHECK_CLEAN(result);
        CHECK(seen == 2);
      } else {
        CHECK_ONLY(result, kRace);
      }
      if (missing == 2) CHECK((seen == 2) == (schedule == acpu::Schedule::kEager));
    }
  }
}

TEST(ordering_is_transitive) {
  Gm<int32_t> x(kCount, 1), y(kCount);
  // MTE2 before V before MTE3: no flag from MTE2 to MTE3 is needed for the buffer that both touch.
  const acpu::Result result =
      acpu::Launch(with(acpu::Schedule::kLazy))
          .region(x.data, x.bytes(), acpu::RegionUse::kIn, "x")
          .region(y.data, y.bytes(), acpu::RegionUse::kOut, "y")
          .run([&] {
            TPipe pipe;
            TBuf<TPosition::VECCALC> a;
            pipe.InitBuffer(a, kBytes);
            DataCopy(a.Get<int32_t>(), x.tensor(), kCount);
            order<HardEvent::MTE2_V>();
            order<HardEvent::V_MTE3>();
            DataCopy(y.tensor(), a.Get<int32_t>(), kCount);
          });
  CHECK_CLEAN(result);
  CHECK(y[9] == 1);
}

TEST(every_reader_is_ordered) {
  for (int missing = 0; missing < 3; ++missing) {
    Gm<int32_t> x(kCount, 1), y(kCount);
    const acpu::Result result = acpu::Launch({})
                                    .region(x.data, x.bytes(), acpu::RegionUse::kIn, "x")
                                    .region(y.data, y.bytes(), acpu::RegionUse::kOut, "y")
                                    .run([&] {
                                      TPipe pipe;
                                      TBuf<TPosition::VECCALC> a, b;
                                      pipe.InitBuffer(a, kBytes);
                                      pipe.InitBuffer(b, kBytes);
                                      auto tensor = a.Get<int32_t>();
                                      DataCopy(tensor, x.tensor(), kCount);
                                      order<HardEvent::MTE2_V>();
                                      if (missing != 1) order<HardEvent::MTE2_MTE3>();
                                      Adds(b.Get<int32_t>(), tensor, 1, kCount);
                                      DataCopy(y.tensor(), tensor, kCount);
                                      if (missing != 2) order<HardEvent::V_MTE2>();
                                      order<HardEvent::MTE3_MTE2>();
                                      DataCopy(tensor, x.tensor(), kCount);
                                    });
    if (missing == 0) {
      CHECK_CLEAN(result);
    } else {
      CHECK_ONLY(result, kRace);
      CHECK(result.reports.size() == 1);
    }
  }
}

TEST(overlapping_stores_to_global_memory_need_a_barrier) {
  for (bool barrier : {true, false}) {
    Gm<int32_t> y(kCount);
    const acpu::Result result = acpu::Launch(with(acpu::Schedule::kLazy))
                                    .region(y.data, y.bytes(), acpu::RegionUse::kOut, "y")
                                    .run([&] {
                                      TPipe pipe;
                                      TBuf<TPosition::VECCALC> a;
                                      pipe.InitBuffer(a, kBytes);
                                      auto first = a.Get<int32_t>(32), second = a.GetWithOffset<int32_t>(32, 128);
                                      Duplicate(first, 1, 32);
                                      Duplicate(second, 2, 32);
                                      order<HardEvent::V_MTE3>();
                                      DataCopy(y.tensor(), first, 32);
                                      if (barrier) PipeBarrier<PIPE_MTE3>();
                                      DataCopy(y.tensor()[16], second, 32);
                                    });
    if (barrier) {
      CHECK_CLEAN(result);
    } else {
      CHECK_ONLY(result, kRace);
    }
    CHECK(y[20] == (barrier ? 2 : 1));
  }
}

TEST(a_flag_set_twice) {
  CHECK_ONLY(run([] {
               TPipe pipe;
               const TEventID id = pipe.AllocEventID<HardEvent::MTE2_V>();
               SetFlag<HardEvent::MTE2_V>(id);
               SetFlag<HardEvent::MTE2_V>(id);
               WaitFlag<HardEvent::MTE2_V>(id);
               pipe.ReleaseEventID<HardEvent::MTE2_V>(id);
             }),
             kFlagSetTwice);
}

TEST(a_flag_never_set_is_a_deadlock) {
  for (acpu::Schedule schedule : testing::kSchedules) {
    const acpu::Result result = run(
        [] {
          TPipe pipe;
          WaitFlag<HardEvent::V_MTE3>(pipe.FetchEventID<HardEvent::V_MTE3>());
        },
        with(schedule));
    CHECK_ONLY(result, kDeadlock);
    CHECK(!result.completed);
  }
}

TEST(flags_of_another_event_or_id_do_not_count) {
  CHECK_HAS(run([] {
              TPipe pipe;
              const TEventID a = pipe.AllocEventID<HardEvent::V_MTE3>(), b = pipe.AllocEventID<HardEvent::V_MTE3>();
              SetFlag<HardEvent::V_MTE3>(a);
              WaitFlag<HardEvent::V_MTE3>(b);
            }),
            kDeadlock);
  CHECK_HAS(run([] {
              TPipe pipe;
              SetFlag<HardEvent::V_MTE3>(pipe.FetchEventID<HardEvent::V_MTE3>());
              WaitFlag<HardEvent::V_MTE2>(pipe.FetchEventID<HardEvent::V_MTE2>());
            }),
            kDeadlock);
}

TEST(a_flag_left_set_leaks) {
  CHECK_ONLY(run([] {
               TPipe pipe;
               SetFlag<HardEvent::V_MTE3>(pipe.FetchEventID<HardEvent::V_MTE3>());
             }),
             kFlagLeak);
}

TEST(event_ids) {
  CHECK_ONLY(run([] {
               TPipe pipe;
               SetFlag<HardEvent::V_MTE3>(8);
             }),
             kEventId);
  CHECK_ONLY(run([] {  // an id of one's own
               TPipe pipe;
               SetFlag<HardEvent::V_MTE3>(EVENT_ID3);
               WaitFlag<HardEvent::V_MTE3>(EVENT_ID3);
             }),
             kEventId);
  CHECK_ONLY(run([] {  // eight, then a ninth
               TPipe pipe;
               for (int i = 0; i < 9; ++i) pipe.AllocEventID<HardEvent::V_MTE3>();
             }),
             kEventId);
  CHECK_ONLY(run([] {  // not released
               TPipe pipe;
               pipe.AllocEventID<HardEvent::V_MTE3>();
             }),
             kEventId);
  CHECK_ONLY(run([] {  // released twice
               TPipe pipe;
               const TEventID id = pipe.AllocEventID<HardEvent::V_MTE3>();
               pipe.ReleaseEventID<HardEvent::V_MTE3>(id);
               pipe.ReleaseEventID<HardEvent::V_MTE3>(id);
             }),
             kEventId);
  CHECK_CLEAN(run([] {
    TPipe pipe;
    TEventID ids[8];
    for (TEventID& id : ids) id = pipe.AllocEventID<HardEvent::V_MTE3>();
    for (int i = 0; i < 8; ++i) CHECK(ids[i] == i);
    for (TEventID id : ids) pipe.ReleaseEventID<HardEvent::V_MTE3>(id);
    CHECK(pipe.FetchEventID(HardEvent::V_MTE3) == 0);
  }));
}

TEST(releasing_a_set_flag_leaks) {
  const acpu::Result result = run([] {
    TPipe pipe;
    const TEventID id = pipe.AllocEventID<HardEvent::V_MTE3>();
    SetFlag<HardEvent::V_MTE3>(id);
    pipe.ReleaseEventID<HardEvent::V_MTE3>(id);
  });
  CHECK_ONLY(result, kFlagLeak);
  CHECK(result.reports.size() == 2 && result.reports[0].site.api == "ReleaseEventID");
}

}  // namespace
