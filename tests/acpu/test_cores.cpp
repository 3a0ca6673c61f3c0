// Several cores: their order, SyncAll, shared lines, and the scalar data cache between a core and global memory.
#include "harness.h"

using namespace AscendC;
using testing::Gm;
using testing::run;
using testing::with;

namespace {

constexpr uint32_t kLine = 16;  // int32 elements of a cache line

template <HardEvent event>
void order() {
  const TEventID id = GetTPipePtr()->FetchEventID(event);
  SetFlag<event>(id);
  WaitFlag<event>(id);
}

template <typename T>
void flush(const GlobalTensor<T>& at) {
  DataCacheCleanAndInvalid<T, CacheLine::SINGLE_CACHE_LINE, DcciDst::CACHELINE_OUT>(at);
}

// Writes `count` times `value` with the copy engine.
void store(const GlobalTensor<int32_t>& to, int32_t value, uint32_t count) {
  TPipe pipe;
  TBuf<TPosition::VECCALC> buffer;
  pipe.InitBuffer(buffer, 256);
  Duplicate(buffer.Get<int32_t>(), value, 64);
  order<HardEvent::V_MTE3>();
  DataCopyPad(to, buffer.Get<int32_t>(), {1, count * 4, 0, 0, 0});
}

acpu::Result launch(Gm<int32_t>& y, acpu::RegionUse use, const acpu::Options& options,
                    const std::function<void()>& kernel) {
  return acpu::Launch(options).region(y.data, y.bytes(), use, "y").run(kernel);
}

TEST(every_core_runs_once) {
  for (acpu::Schedule schedule : testing::kSchedules) {
    for (int cores : {1, 5, 40}) {
      Gm<int32_t> y(cores * kLine);
      CHECK_CLEAN(launch(y, acpu::RegionUse::kOut, with(schedule, cores), [&] {
        CHECK(GetBlockNum() == cores);
        store(y.tensor()[GetBlockIdx() * kLine], static_cast<int32_t>(GetBlockIdx()), kLine);
      }));
      for (int core = 0; core < cores; ++core) CHECK(y[core * kLine] == core && y[core * kLine + 15] == core);
    }
  }
}

TEST(bad_options_throw) {
  for (int cores : {0, 65}) {
    bool thrown = false;
    try {
      run([] {}, with(acpu::Schedule::kEager, cores));
    } catch (const std::invalid_argument&) {
      thrown = true;
    }
    CHECK(thrown);
  }
}

TEST(bad_regions_throw) {
  Gm<uint8_t> y(256);
  const auto throws = [](const std::function<void()>& body) {
    try {
      body();
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  using enum acpu::RegionUse;
  CHECK(!throws([&] { acpu::Launch({}).region(y.data, 64, kIn, "a").region(y.data + 64, 64, kIn, "b"); }));
  CHECK(throws([&] { acpu::Launch({}).region(y.data + 32, 64, kIn, "a"); }));
  CHECK(throws([&] { acpu::Launch({}).region(y.data, 0, kIn, "a"); }));
  CHECK(throws([&] { acpu::Launch({}).region(y.data, 65, kIn, "a").region(y.data + 64, 64, kIn, "b"); }));
}

TEST(two_cores_write_the_same_bytes) {
  Gm<int32_t> y(kLine);
  CHECK_ONLY(launch(y, acpu::RegionUse::kOut, with(acpu::Schedule::kEager, 2), [&] { store(y.tensor(), 1, kLine); }),
             kCrossCoreRace);
}

TEST(two_cores_write_one_line) {
  for (bool apart : {true, false}) {
    Gm<int32_t> y(2 * kLine);
    const acpu::Result result = launch(y, acpu::RegionUse::kOut, with(acpu::Schedule::kLazy, 2), [&] {
      store(y.tensor()[GetBlockIdx() * (apart ? kLine : 8)], 1, 8);
    });
    if (apart) {
      CHECK_CLEAN(result);
    } else {
      CHECK_ONLY(result, kSharedLine);
    }
  }
}

// Core 0 writes, core 1 reads by the copy engine.
acpu::Result hand_over(Gm<int32_t>& y, int32_t& seen, bool sync, const acpu::Options& options) {
  return launch(y, acpu::RegionUse::kInOut, options, [&] {
    if (GetBlockIdx() == 0) store(y.tensor(), 7, kLine);
    if (sync) SyncAll();
    if (GetBlockIdx() == 0) return;
    TPipe pipe;
    TBuf<TPosition::VECCALC> buffer;
    pipe.InitBuffer(buffer, 64);
    DataCopy(buffer.Get<int32_t>(), y.tensor(), kLine);
    order<HardEvent::MTE2_S>();
    seen = buffer.Get<int32_t>().GetValue(0);
  });
}

TEST(sync_all_orders_cores) {
  for (acpu::Schedule schedule : testing::kSchedules) {
    Gm<int32_t> y(kLine, 1);
    int32_t seen = 0;
    CHECK_CLEAN(hand_over(y, seen, true, with(schedule, 2)));
    CHECK(seen == 7);
    y[0] = 1;
    CHECK_ONLY(hand_over(y, seen, false, with(schedule, 2)), kCrossCoreRace);
    CHECK(seen == (schedule == acpu::Schedule::kLazy ? 1 : 7));  // under kLazy core 1 comes first
  }
}

TEST(a_dropped_sync_all_is_a_missing_one) {
  Gm<int32_t> y(kLine, 1);
  int32_t seen = 0;
  acpu::Options options = with(acpu::Schedule::kLazy, 2);
  const acpu::Result whole = hand_over(y, seen, true, options);
  for (const acpu::SyncSite& site : whole.sync_sites) {
    if (site.site.api == "SyncAll") options.drop = {site.site.key()};
    CHECK(site.site.api != "SyncAll" || site.hits == 2);
  }
  CHECK(options.drop.size() == 1);
  y[0] = 1;
  CHECK_ONLY(hand_over(y, seen, true, options), kCrossCoreRace);
  CHECK(seen == 1);
}

TEST(sync_all_completes_all_pipes) {
  for (acpu::Schedule schedule : testing::kSchedules) {
    Gm<int32_t> y(2 * kLine, 1);
    CHECK_CLEAN(launch(y, acpu::RegionUse::kInOut, with(schedule, 2), [&] {
      TPipe pipe;
      TBuf<TPosition::VECCALC> buffer;
      pipe.InitBuffer(buffer, 64);
      auto a = buffer.Get<int32_t>();
      DataCopy(a, y.tensor(), kLine);
      SyncAll();
      a.SetValue(0, a.GetValue(0) + 1);
    }));
  }
}

TEST(a_core_that_skips_sync_all_is_a_deadlock) {
  const acpu::Result result = run(
      [] {
        if (GetBlockIdx() != 3) SyncAll();
      },
      with(acpu::Schedule::kEager, 5));
  CHECK_ONLY(result, kDeadlock);
  CHECK(!result.completed);
  CHECK(result.reports.size() == 1 && result.reports[0].count == 4);
}

TEST(the_first_stop_is_the_one_reported) {
  const acpu::Result result = run(
      [] {
        TPipe pipe;
        if (GetBlockIdx() == 1) WaitFlag<HardEvent::V_MTE3>(pipe.FetchEventID<HardEvent::V_MTE3>());
        SyncAll();
      },
      with(acpu::Schedule::kEager, 3));
  CHECK_ONLY(result, kDeadlock);
  CHECK(result.reports.size() == 1 && result.reports[0].site.api == "WaitFlag");
}

TEST(software_sync_all) {
  Gm<int32_t> workspace(5 * 8), small(8);
  auto kernel = [&](Gm<int32_t>& memory, uint32_t bytes) {
    return launch(memory, acpu::RegionUse::kInOut, with(acpu::Schedule::kEager, 5), [&] {
      TPipe pipe;
      TBuf<TPosition::VECCALC> buffer;
      pipe.InitBuffer(buffer, bytes);
      SyncAll(memory.tensor(), buffer.Get<int32_t>());
    });
  };
  CHECK_CLEAN(kernel(workspace, 160));
  CHECK_ONLY(kernel(small, 160), kLimit);
  CHECK_ONLY(kernel(workspace, 128), kLimit);
}

// Scalar writes -----------------------------------------------------------------------------------------------------

TEST(a_scalar_write_must_be_cleaned) {
  for (acpu::Schedule schedule : testing::kSchedules) {
    for (bool clean : {true, false}) {
      Gm<int32_t> y(kLine, 1);
      const acpu::Result result = launch(y, acpu::RegionUse::kInOut, with(schedule), [&] {
        auto global = y.tensor();
        global.SetValue(3, 9);
        CHECK(global.GetValue(3) == 9);  // its own core sees it
        if (clean) flush(global);
      });
      if (clean) {
        CHECK_CLEAN(result);
      } else {
        CHECK_ONLY(result, kUnflushedWrite);
      }
      CHECK(y[3] == (clean || schedule == acpu::Schedule::kEager ? 9 : 1));
      CHECK(y[2] == 1);
    }
  }
}

TEST(the_whole_cache_is_cleaned_at_once) {
  Gm<int32_t> y(3 * kLine, 1);
  CHECK_CLEAN(launch(y, acpu::RegionUse::kInOut, with(acpu::Schedule::kLazy), [&] {
    auto global = y.tensor();
    global.SetValue(0, 5);
    global.SetValue(40, 6);
    DataCacheCleanAndInvalid<int32_t, CacheLine::ENTIRE_DATA_CACHE>(global);
  }));
  CHECK(y[0] == 5 && y[40] == 6 && y[41] == 1);
}

TEST(one_line_is_cleaned_from_the_address_on) {
  Gm<int32_t> y(kLine, 1);
  CHECK_ONLY(launch(y, acpu::RegionUse::kInOut, with(acpu::Schedule::kLazy), [&] {
    auto global = y.tensor();
    global.SetValue(0, 5);
    global.SetValue(12, 6);
    flush(global[8]);
  }),
             kUnflushedWrite);
  CHECK(y[0] == 1 && y[12] == 6);
}

TEST(copy_engine_after_a_scalar_write) {
  for (int missing = 0; missing < 3; ++missing) {  // 1: the clean, 2: the flag
    Gm<int32_t> y(kLine, 1);
    int32_t seen = 0;
    const acpu::Result result = launch(y, acpu::RegionUse::kInOut, with(acpu::Schedule::kLazy), [&] {
      TPipe pipe;
      TBuf<TPosition::VECCALC> buffer;
      pipe.InitBuffer(buffer, 64);
      auto global = y.tensor();
      global.SetValue(3, 9);
      if (missing != 1) flush(global);
      if (missing != 2) order<HardEvent::S_MTE2>();
      DataCopy(buffer.Get<int32_t>(), global, kLine);
      order<HardEvent::MTE2_S>();
      seen = buffer.Get<int32_t>().GetValue(3);
      flush(global);
    });
    if (missing == 0) {
      CHECK_CLEAN(result);
      CHECK(seen == 9);
    } else if (missing == 1) {
      CHECK_HAS(result, kUnflushedWrite);
      CHECK(seen == 1);
    } else {
      CHECK_ONLY(result, kRace);
    }
  }
}

TEST(a_flag_before_the_clean_is_too_early) {
  Gm<int32_t> y(kLine, 1);
  CHECK_ONLY(launch(y, acpu::RegionUse::kInOut, {}, [&] {
    TPipe pipe;
    TBuf<TPosition::VECCALC> buffer;
    pipe.InitBuffer(buffer, 64);
    auto global = y.tensor();
    global.SetValue(3, 9);
    order<HardEvent::S_MTE2>();
    flush(global);
    DataCopy(buffer.Get<int32_t>(), global, kLine);
  }),
             kRace);
}

TEST(another_core_after_a_scalar_write) {
  for (bool clean : {true, false}) {
    Gm<int32_t> y(kLine, 1);
    int32_t seen = 0;
    const acpu::Result result = launch(y, acpu::RegionUse::kInOut, with(acpu::Schedule::kLazyReverse, 2), [&] {
      auto global = y.tensor();
      if (GetBlockIdx() == 0) {
        global.SetValue(3, 9);
        if (clean) flush(global);
      }
      SyncAll();
      if (GetBlockIdx() == 1) seen = global.GetValue(3);
    });
    CHECK(seen == (clean ? 9 : 1));
    if (clean) {
      CHECK_CLEAN(result);
    } else {
      CHECK_HAS(result, kUnflushedWrite);
    }
  }
}

TEST(two_cores_write_one_line_by_scalars) {
  Gm<int32_t> y(kLine, 1);
  const acpu::Result result = launch(y, acpu::RegionUse::kInOut, with(acpu::Schedule::kEager, 2), [&] {
    auto global = y.tensor();
    global.SetValue(GetBlockIdx() * 8, 9);
    flush(global);
  });
  CHECK_ONLY(result, kSharedLine);
}

TEST(a_write_back_takes_its_line_along) {
  Gm<int32_t> y(kLine, 1);
  const acpu::Result result = launch(y, acpu::RegionUse::kInOut, with(acpu::Schedule::kEager), [&] {
    auto global = y.tensor();
    global.SetValue(0, 9);      // caches the line
    store(global[8], 5, 8);     // changes its other half in global memory
    PipeBarrier<PIPE_ALL>();
    flush(global);              // and brings the old half back
  });
  CHECK_HAS(result, kLineClobber);
  CHECK(y[0] == 9 && y[8] == 1);
}

// Scalar reads ------------------------------------------------------------------------------------------------------

TEST(a_cached_line_goes_stale) {
  for (acpu::Schedule schedule : testing::kSchedules) {
    for (bool invalidate : {true, false}) {
      Gm<int32_t> y(kLine, 1);
      int32_t seen = 0;
      const acpu::Result result = launch(y, acpu::RegionUse::kInOut, with(schedule, 2), [&] {
        auto global = y.tensor();
        if (GetBlockIdx() == 1) CHECK(global.GetValue(0) == 1);
        SyncAll();
        if (GetBlockIdx() == 0) store(global, 7, kLine);
        SyncAll();
        if (GetBlockIdx() == 0) return;
        if (invalidate) flush(global);
        seen = global.GetValue(4);
      });
      CHECK(seen == (invalidate ? 7 : 1));
      if (invalidate) {
        CHECK_CLEAN(result);
      } else {
        CHECK_ONLY(result, kStaleRead);
      }
    }
  }
}

TEST(a_stale_line_is_harmless_where_it_did_not_change) {
  Gm<int32_t> y(kLine, 1);
  CHECK_CLEAN(launch(y, acpu::RegionUse::kInOut, with(acpu::Schedule::kLazyReverse, 2), [&] {
    auto global = y.tensor();
    if (GetBlockIdx() == 1) global.GetValue(0);
    SyncAll();
    if (GetBlockIdx() == 0) store(global[8], 7, 8);
    SyncAll();
    if (GetBlockIdx() == 1) CHECK(global.GetValue(1) == 1);
  }));
}

TEST(own_copies_make_own_lines_stale) {
  Gm<int32_t> y(kLine, 1);
  CHECK_ONLY(launch(y, acpu::RegionUse::kInOut, with(acpu::Schedule::kEager), [&] {
    auto global = y.tensor();
    global.GetValue(0);
    PipeBarrier<PIPE_ALL>();
    store(global, 7, kLine);
    PipeBarrier<PIPE_ALL>();
    global.GetValue(0);
  }),
             kStaleRead);
}

TEST(a_dropped_clean_is_a_missing_one) {
  Gm<int32_t> y(kLine, 1);
  const auto kernel = [&] {
    auto global = y.tensor();
    global.SetValue(3, 9);
    flush(global);
  };
  const acpu::Result whole = launch(y, acpu::RegionUse::kInOut, {}, kernel);
  CHECK_CLEAN(whole);
  CHECK(whole.sync_sites.size() == 1 && whole.sync_sites[0].site.api == "DataCacheCleanAndInvalid");
  acpu::Options options;
  options.drop = {whole.sync_sites[0].site.key()};
  CHECK_ONLY(launch(y, acpu::RegionUse::kInOut, options, kernel), kUnflushedWrite);
}

TEST(a_kernel_that_throws) {
  const acpu::Result result = run([] { throw std::runtime_error("lost"); }, with(acpu::Schedule::kEager, 3));
  CHECK_ONLY(result, kException);
  CHECK(!result.completed && result.reports[0].count == 3);
}

}  // namespace
