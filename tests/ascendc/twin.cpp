// The kernels on the CPU twin, behind a C interface for ctypes.
#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "acpu.h"
#include "entries.h"

namespace {

using namespace kvoffload::ascendc;

constexpr size_t kLine = 64;

struct Argument {
  uint8_t* data;
  int64_t bytes;
  int32_t use;  // 0: in, 1: in and out, 2: out
  const char* name;
};

// Memory that begins on a line, as the device allocator's does.
class Lines {
 public:
  explicit Lines(size_t bytes) : bytes_(bytes), store_(bytes + kLine) {}
  uint8_t* data() {
    return store_.data() + (kLine - reinterpret_cast<uintptr_t>(store_.data()) % kLine) % kLine;
  }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_;
  std::vector<uint8_t> store_;
};

struct Call {
  const Argument* args;
  int32_t count;
  const int64_t* shape;
  int32_t shape_count;
  acpu::Options options;
};

// Outcome of an operator: a refusal, or a launch's result.
struct Outcome {
  std::string refusal;
  acpu::Result result;
};

acpu::Launch launch_of(const Call& call) {
  acpu::Launch launch(call.options);
  for (int32_t i = 0; i < call.count; ++i) {
    const Argument& argument = call.args[i];
    if (argument.bytes > 0) {
      launch.region(argument.data, static_cast<size_t>(argument.bytes),
                    static_cast<acpu::RegionUse>(argument.use), argument.name);
    }
  }
  return launch;
}

template <typename Shape>
Shape shape_of(const Call& call);

template <>
ServeShape shape_of(const Call& call) {
  const int64_t* s = call.shape;
  return {s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], {s[8], s[9]}};
}

template <>
ServeCompactShape shape_of(const Call& call) {
  const int64_t* s = call.shape;
  return {s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], {s[8], s[9]}};
}

template <>
InstallShape shape_of(const Call& call) {
  const int64_t* s = call.shape;
  return {s[0], s[1], s[2], s[3], s[4], s[5], {s[6], s[7]}};
}

template <>
GatherShape shape_of(const Call& call) {
  const int64_t* s = call.shape;
  return {s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], {s[9], s[10]}};
}

template <>
HostWriteShape shape_of(const Call& call) {
  const int64_t* s = call.shape;
  return {s[0], s[1], s[2], {s[3], s[4]}};
}

template <>
PlanShape shape_of(const Call& call) {
  const int64_t* s = call.shape;
  return {s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9] != 0};
}

Outcome run_serve(const Call& call) {
  const auto tiled = tile_dsa_serve(shape_of<ServeShape>(call), call.options.cores);
  if (!tiled.ok()) return {tiled.refusal, {}};
  const auto* a = call.args;
  return {"", launch_of(call).run([&] {
            kvoffload_dsa_serve(a[0].data, a[1].data, a[2].data, a[3].data, a[4].data, a[5].data, a[6].data, a[7].data,
                                a[8].data, a[9].data, a[10].data, a[11].data, a[12].data, a[13].data, tiled.data);
          })};
}

Outcome run_serve_compact(const Call& call) {
  const auto tiled = tile_dsa_serve_compact(shape_of<ServeCompactShape>(call), call.options.cores);
  if (!tiled.ok()) return {tiled.refusal, {}};
  const auto* a = call.args;
  return {"", launch_of(call).run([&] {
            kvoffload_dsa_serve_compact(a[0].data, a[1].data, a[2].data, a[3].data, a[4].data, a[5].data, a[6].data,
                                        a[7].data, a[8].data, a[9].data, a[10].data, a[11].data, a[12].data,
                                        a[13].data, tiled.data);
          })};
}

Outcome run_install(const Call& call) {
  const auto tiled = tile_dsa_install(shape_of<InstallShape>(call), call.options.cores);
  if (!tiled.ok()) return {tiled.refusal, {}};
  const auto* a = call.args;
  return {"", launch_of(call).run([&] {
            kvoffload_dsa_install(a[0].data, a[1].data, a[2].data, a[3].data, a[4].data, a[5].data, a[6].data,
                                  a[7].data, a[8].data, a[9].data, tiled.data);
          })};
}

Outcome run_gather(const Call& call) {
  const auto tiled = tile_gather_selection(shape_of<GatherShape>(call), call.options.cores);
  if (!tiled.ok()) return {tiled.refusal, {}};
  const auto* a = call.args;
  return {"", launch_of(call).run([&] {
            kvoffload_gather_selection(a[0].data, a[1].data, a[2].data, a[3].data, a[4].data, a[5].data, a[6].data,
                                       a[7].data, a[8].data, a[9].data, a[10].data, a[11].data, a[12].data,
                                       a[13].data, tiled.data);
          })};
}

Outcome run_host_write(const Call& call) {
  const auto tiled = tile_host_write(shape_of<HostWriteShape>(call), call.options.cores);
  if (!tiled.ok()) return {tiled.refusal, {}};
  const auto* a = call.args;
  return {"", launch_of(call).run([&] {
            kvoffload_host_write(a[0].data, a[1].data, a[2].data, a[3].data, a[4].data, a[5].data, tiled.data);
          })};
}

Outcome run_plan(const Call& call) {
  const auto tiled = tile_dsa_plan(shape_of<PlanShape>(call), call.options.cores);
  if (!tiled.ok()) return {tiled.refusal, {}};
  const auto* a = call.args;
  Lines workspace(static_cast<size_t>(workspace_bytes(tiled.data)));
  acpu::Launch launch = launch_of(call);
  if (workspace.bytes() > 0) {
    launch.region(workspace.data(), workspace.bytes(), acpu::RegionUse::kOut, "workspace");
  }
  return {"", launch.run([&] {
            kvoffload_dsa_plan(a[0].data, a[1].data, a[2].data, a[3].data, a[4].data, a[5].data, a[6].data,
                               a[7].data, a[8].data, a[9].data, a[10].data, a[11].data, a[12].data, a[13].data,
                               a[14].data, a[15].data, workspace.data(), tiled.data);
          })};
}

struct Operator {
  int32_t arguments;
  int32_t shape;
  Outcome (*run)(const Call&);
};

const std::map<std::string, Operator>& operators() {
  static const std::map<std::string, Operator> table{
      {"dsa_serve", {14, 10, run_serve}},
      {"dsa_serve_compact", {14, 10, run_serve_compact}},
      {"dsa_install", {10, 8, run_install}},
      {"gather_selection", {14, 11, run_gather}},
      {"host_write", {6, 5, run_host_write}},
      {"dsa_plan", {16, 10, run_plan}},
  };
  return table;
}

void put(const std::string& from, char* to, int64_t bytes) {
  const size_t size = std::min(from.size(), static_cast<size_t>(bytes - 1));
  std::memcpy(to, from.data(), size);
  to[size] = 0;
}

std::string describe(const RowsTiling& rows) {
  std::ostringstream out;
  out << "batch_rows " << rows.batch_rows << "\nbuffer_bytes " << rows.buffer_bytes << "\npitch0 " << rows.pitch[0]
      << "\npitch1 " << rows.pitch[1] << '\n';
  return out.str();
}

template <typename Data>
std::string describe(const Data& data)
  requires requires { data.by_request; }
{
  return "by_request " + std::to_string(data.by_request) + '\n' + describe(data.rows);
}

std::string describe(const ServeCompactTiling& data) {
  return "group " + std::to_string(data.group) + '\n' + describe(data.rows);
}

std::string describe(const HostWriteTiling& data) {
  return "group " + std::to_string(data.group) + '\n' + describe(data.rows);
}

std::string describe(const GatherTiling& data) {
  return "table_bits " + std::to_string(data.table_bits) + '\n' + describe(data.rows);
}

std::string describe(const PlanTiling& data) {
  std::ostringstream out;
  out << "parts " << data.parts << "\npart_sets " << data.part_sets << "\npadded_width " << data.padded_width
      << "\nvalues_offset " << data.values_offset << "\nrecords_offset " << data.records_offset << "\ntotals_offset "
      << data.totals_offset << "\nstates_offset " << data.states_offset << "\nempties_offset " << data.empties_offset
      << "\nworkspace_bytes " << workspace_bytes(data) << '\n';
  return out.str();
}

// With what depends on the shape as well.
std::string describe_plan(const PlanShape& shape, const PlanTiling& data) {
  return describe(data) + "ub_bytes " + std::to_string(plan_ub_bytes(shape, data)) + '\n';
}

template <typename Data>
int32_t tell(const Tiled<Data>& tiled, char* text, int64_t bytes) {
  put(tiled.ok() ? describe(tiled.data) : tiled.refusal, text, bytes);
  return tiled.ok() ? 0 : 2;
}

}  // namespace

extern "C" {

// 0: ran; `text` has a line "R report" for each report and "S key api hits" for each synchronisation site.
// 2: refused; `text` says why. 3: no such operator, or not its arguments.
int32_t kernels_run(const char* name, const Argument* args, int32_t count, const int64_t* shape, int32_t shape_count,
                    int32_t cores, int32_t schedule, int32_t ub_bytes, const char* drop, char* text,
                    int64_t text_bytes) {
  const auto found = operators().find(name);
  if (found == operators().end() || found->second.arguments != count || found->second.shape != shape_count) return 3;
  Call call{args, count, shape, shape_count, {}};
  call.options.cores = cores;
  call.options.schedule = static_cast<acpu::Schedule>(schedule);
  call.options.ub_bytes = static_cast<uint32_t>(ub_bytes);
  if (*drop != 0) call.options.drop = {drop};
  const Outcome outcome = found->second.run(call);
  if (!outcome.refusal.empty()) {
    put(outcome.refusal, text, text_bytes);
    return 2;
  }
  std::ostringstream out;
  for (const acpu::Report& report : outcome.result.reports) {
    out << "R " << acpu::kind_name(report.kind) << ": " << report.message << '\n';
  }
  for (const acpu::SyncSite& site : outcome.result.sync_sites) {
    out << "S " << site.site.key() << ' ' << site.site.api << ' ' << site.hits << '\n';
  }
  for (const uint64_t cycles : outcome.result.cost.phases) out << "C " << cycles << '\n';
  const acpu::Work& work = outcome.result.cost.work;
  out << "W " << work.scalar_reads << ' ' << work.scalar_writes << ' ' << work.vectors << ' ' << work.copies << ' '
      << work.copied_bytes << ' ' << work.flags << '\n';
  put(out.str(), text, text_bytes);
  return 0;
}

// The tiling of a shape, "name value" lines; 2 with the refusal.
int32_t kernels_tile(const char* name, const int64_t* shape, int32_t shape_count, int32_t cores, char* text,
                     int64_t text_bytes) {
  const auto found = operators().find(name);
  if (found == operators().end() || found->second.shape != shape_count) return 3;
  const Call call{nullptr, 0, shape, shape_count, {}};
  const std::string op = name;
  if (op == "dsa_serve") return tell(tile_dsa_serve(shape_of<ServeShape>(call), cores), text, text_bytes);
  if (op == "dsa_serve_compact") {
    return tell(tile_dsa_serve_compact(shape_of<ServeCompactShape>(call), cores), text, text_bytes);
  }
  if (op == "dsa_install") return tell(tile_dsa_install(shape_of<InstallShape>(call), cores), text, text_bytes);
  if (op == "gather_selection") {
    return tell(tile_gather_selection(shape_of<GatherShape>(call), cores), text, text_bytes);
  }
  if (op == "host_write") return tell(tile_host_write(shape_of<HostWriteShape>(call), cores), text, text_bytes);
  const auto shape_of_plan = shape_of<PlanShape>(call);
  const auto tiled = tile_dsa_plan(shape_of_plan, cores);
  put(tiled.ok() ? describe_plan(shape_of_plan, tiled.data) : tiled.refusal, text, text_bytes);
  return tiled.ok() ? 0 : 2;
}
}
