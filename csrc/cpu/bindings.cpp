// Python bindings: tensors in, views out, the GIL released around the work. No logic of its own.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "../policies/names.h"
#include "compact.h"
#include "conformance.h"
#include "copies.h"
#include "gather.h"
#include "isa.h"
#include "plan.h"
#include "tensor.h"

namespace nb = nanobind;

namespace kvoffload {
namespace {

// Holds the tensors, so that their memory outlives the views; importing them once keeps a step's call cheap.
class ResidencyHandle {
 public:
  ResidencyHandle(const Tensor& tags, const Tensor& ages, const Tensor& hands, const Tensor& high,
                  const std::string& policy, const std::string& placement)
      : tensors_{tags.object(), ages.object(), hands.object(), high.object()} {
    const std::int64_t partitions = tags.extent(0);
    const std::int64_t sets = tags.extent(1);
    const std::int64_t set_ways = tags.extent(2);
    view.tags = data_of<std::int32_t, 3>(tags, "tags", {kAny, kAny, kAny});
    view.ages = data_of<std::uint8_t, 3>(ages, "ages", {partitions, sets, set_ways});
    view.hands = data_of<std::uint8_t, 2>(hands, "hands", {partitions, sets});
    view.high = data_of<std::int32_t, 1>(high, "high", {partitions});
    view.partitions = partitions;
    view.sets = sets;
    view.set_ways = static_cast<int>(set_ways);
    const std::optional<Policy> known = policy_named(policy);
    if (!known) refuse("policy: expected one of ", policy_names(), ", got '", policy, "'");
    view.policy = *known;
    const std::optional<Placement> placed = placement_named(placement);
    if (!placed) refuse("placement: expected one_set or two_sets, got '", placement, "'");
    view.placement = *placed;
    check_residency(view);
  }

  ResidencyView view{};

 private:
  std::array<nb::object, 4> tensors_;
};

class PlanOutHandle {
 public:
  PlanOutHandle(const Tensor& slots, const Tensor& new_slots, const Tensor& miss_ids, const Tensor& miss_slots,
                const Tensor& miss_counts, const Tensor& stats, const Tensor& kinds, const Tensor& miss_positions)
      : tensors_{slots.object(),       new_slots.object(), miss_ids.object(), miss_slots.object(),
                 miss_counts.object(), stats.object(),     kinds.object(),    miss_positions.object()} {
    view.max_tokens = slots.extent(0);
    view.width = slots.extent(1);
    view.max_requests = miss_ids.extent(0);
    view.miss_capacity = miss_ids.extent(1);
    view.slots = data_of<std::int32_t, 2>(slots, "slots", {kAny, kAny});
    view.new_slots = data_of<std::int32_t, 1>(new_slots, "new_slots", {view.max_tokens});
    view.miss_ids = data_of<std::int32_t, 2>(miss_ids, "miss_ids", {kAny, kAny});
    view.miss_slots = data_of<std::int32_t, 2>(miss_slots, "miss_slots", {view.max_requests, view.miss_capacity});
    view.miss_counts = data_of<std::int32_t, 1>(miss_counts, "miss_counts", {view.max_requests});
    view.stats = data_of<std::int64_t, 1>(stats, "stats", {kStatsCount});
    auto* kinds_data = data_of<std::int32_t, 3>(kinds, "kinds", {kAny, view.width, 2});
    auto* positions_data = data_of<std::int32_t, 2>(miss_positions, "miss_positions", {kAny, view.miss_capacity});
    if (kinds.extent(0) == 0 && miss_positions.extent(0) == 0) return;  // no compact delivery
    require(kinds.extent(0) == view.max_tokens, "kinds: ", kinds.extent(0), " tokens, but slots has ",
            view.max_tokens);
    require(miss_positions.extent(0) == view.max_requests, "miss_positions: ", miss_positions.extent(0),
            " requests, but miss_ids has ", view.max_requests);
    view.kinds = kinds_data;
    view.miss_positions = positions_data;
  }

  PlanOutput view{};

 private:
  std::array<nb::object, 8> tensors_;
};

void py_plan(const Tensor& topk, const Tensor& query_start_loc, const Tensor& seq_lens, const Tensor& rows,
             const ResidencyHandle& residency, const PlanOutHandle& out, Workspace& workspace) {
  PlanInput in{};
  in.requests = seq_lens.extent(0);
  in.topk = data_of<std::int32_t, 2>(topk, "topk", {kAny, kAny});
  in.seq_lens = data_of<std::int32_t, 1>(seq_lens, "seq_lens", {kAny});
  in.query_start_loc = data_of<std::int32_t, 1>(query_start_loc, "query_start_loc", {in.requests + 1});
  in.rows = data_of<std::int32_t, 1>(rows, "rows", {in.requests});
  in.tokens = topk.extent(0);
  in.width = topk.extent(1);
  nb::gil_scoped_release release;
  dsa_plan(in, residency.view, out.view, workspace);
}

HostPoolView host_view(const Tensor& host) {
  auto* data = data_of<std::uint8_t, 3>(host, "host", {kAny, kAny, kAny});
  return {data, host.extent(0), host.extent(1), host.extent(2)};
}

HotPoolView hot_view(const Tensor& hot) {
  auto* data = data_of<std::uint8_t, 3>(hot, "hot", {kAny, kAny, kAny});
  return {data, hot.extent(0), hot.extent(1), hot.extent(2)};
}

// Longer than the step is fine: such buffers and the block table are allocated once for the largest step.
void require_requests(const char* name, const Tensor& tensor, std::int64_t requests) {
  require(tensor.extent(0) >= requests, name, ": ", tensor.extent(0), " requests, but rows has ", requests);
}

std::int64_t py_serve(const Tensor& host, const Tensor& hot, const Tensor& block_table, const Tensor& rows,
                      const Tensor& miss_ids, const Tensor& miss_slots, const Tensor& miss_counts) {
  const HostPoolView host_pool = host_view(host);
  const HotPoolView hot_pool = hot_view(hot);
  MissView misses{};
  misses.requests = rows.extent(0);
  misses.table_width = block_table.extent(1);
  misses.capacity = miss_ids.extent(1);
  const std::int64_t buffered = miss_ids.extent(0);
  misses.rows = data_of<std::int32_t, 1>(rows, "rows", {kAny});
  misses.block_table = data_of<std::int32_t, 2>(block_table, "block_table", {kAny, kAny});
  misses.ids = data_of<std::int32_t, 2>(miss_ids, "miss_ids", {kAny, kAny});
  misses.slots = data_of<std::int32_t, 2>(miss_slots, "miss_slots", {buffered, misses.capacity});
  misses.counts = data_of<std::int32_t, 1>(miss_counts, "miss_counts", {buffered});
  require_requests("miss_ids", miss_ids, misses.requests);
  require_requests("block_table", block_table, misses.requests);
  nb::gil_scoped_release release;
  return dsa_serve(host_pool, hot_pool, misses);
}

void require_tokens(const char* name, const Tensor& tensor, const char* owner, std::int64_t tokens) {
  require(tensor.extent(0) >= tokens, name, ": ", tensor.extent(0), " tokens, but ", owner, " has ", tokens);
}

RequestsView requests_view(const Tensor& query_start_loc, const Tensor& rows) {
  RequestsView requests{};
  requests.count = rows.extent(0);
  requests.rows = data_of<std::int32_t, 1>(rows, "rows", {kAny});
  requests.starts = data_of<std::int32_t, 1>(query_start_loc, "query_start_loc", {requests.count + 1});
  return requests;
}

std::int64_t py_serve_compact(const Tensor& kinds, const Tensor& query_start_loc, const Tensor& seq_lens,
                              const Tensor& host, const Tensor& hot, const Tensor& block_table, const Tensor& rows,
                              const Tensor& new_rows, const Tensor& selection) {
  const HostPoolView host_pool = host_view(host);
  const HotPoolView hot_pool = hot_view(hot);
  const RequestsView requests = requests_view(query_start_loc, rows);
  CompactView view{};
  view.tokens = new_rows.extent(0);
  view.width = kinds.extent(1);
  view.table_width = block_table.extent(1);
  view.kinds = data_of<std::int32_t, 3>(kinds, "kinds", {kAny, kAny, 2});
  view.seq_lens = data_of<std::int32_t, 1>(seq_lens, "seq_lens", {requests.count});
  view.block_table = data_of<std::int32_t, 2>(block_table, "block_table", {kAny, kAny});
  view.new_rows = data_of<std::uint8_t, 2>(new_rows, "new_rows", {kAny, host_pool.row_bytes});
  view.selection = data_of<std::uint8_t, 3>(selection, "selection", {kAny, view.width, host_pool.row_bytes});
  require_tokens("kinds", kinds, "new_rows", view.tokens);
  require_tokens("selection", selection, "new_rows", view.tokens);
  require_requests("block_table", block_table, requests.count);
  nb::gil_scoped_release release;
  return dsa_serve_compact(host_pool, hot_pool, requests, view);
}

std::int64_t py_install(const Tensor& selection, const Tensor& query_start_loc, const Tensor& rows,
                        const Tensor& miss_positions, const Tensor& miss_slots, const Tensor& miss_counts,
                        const Tensor& hot) {
  const HotPoolView hot_pool = hot_view(hot);
  const RequestsView requests = requests_view(query_start_loc, rows);
  InstallView view{};
  view.tokens = selection.extent(0);
  view.width = selection.extent(1);
  view.capacity = miss_positions.extent(1);
  const std::int64_t buffered = miss_positions.extent(0);
  view.selection = data_of<std::uint8_t, 3>(selection, "selection", {kAny, kAny, hot_pool.row_bytes});
  view.positions = data_of<std::int32_t, 2>(miss_positions, "miss_positions", {kAny, kAny});
  view.slots = data_of<std::int32_t, 2>(miss_slots, "miss_slots", {buffered, view.capacity});
  view.counts = data_of<std::int32_t, 1>(miss_counts, "miss_counts", {buffered});
  require_requests("miss_positions", miss_positions, requests.count);
  nb::gil_scoped_release release;
  return dsa_install(hot_pool, requests, view);
}

std::int64_t py_gather(const Tensor& topk, const Tensor& query_start_loc, const Tensor& seq_lens, const Tensor& rows,
                       const Tensor& host, const Tensor& block_table, const Tensor& new_rows,
                       const Tensor& selection, const Tensor& status, const Tensor& lengths) {
  const HostPoolView host_pool = host_view(host);
  const RequestsView requests = requests_view(query_start_loc, rows);
  GatherView view{};
  view.topk = data_of<std::int32_t, 2>(topk, "topk", {kAny, kAny});
  view.tokens = topk.extent(0);
  view.width = topk.extent(1);
  view.partitions = selection.extent(0);
  view.queries = selection.extent(1);
  view.table_width = block_table.extent(1);
  view.seq_lens = data_of<std::int32_t, 1>(seq_lens, "seq_lens", {requests.count});
  view.block_table = data_of<std::int32_t, 2>(block_table, "block_table", {kAny, kAny});
  view.new_rows = data_of<std::uint8_t, 2>(new_rows, "new_rows", {view.tokens, host_pool.row_bytes});
  view.selection = data_of<std::uint8_t, 4>(selection, "selection", {kAny, kAny, view.width, host_pool.row_bytes});
  view.status = data_of<std::int32_t, 3>(status, "status", {view.partitions, view.queries, view.width + 1});
  view.lengths = data_of<std::int32_t, 1>(lengths, "lengths", {kAny});
  require_tokens("lengths", lengths, "topk", view.tokens);
  require_requests("block_table", block_table, requests.count);
  nb::gil_scoped_release release;
  return gather_selection(host_pool, requests, view);
}

void py_gather_reuse(const Tensor& status, const Tensor& rows, const Tensor& query_start_loc, const Tensor& lengths) {
  const auto* data = data_of<std::int32_t, 3>(status, "status", {kAny, kAny, kAny});
  require(status.extent(2) > 0, "status: expected K + 1 entries per query, got 0");
  const RequestsView requests = requests_view(query_start_loc, rows);
  auto* to = data_of<std::int32_t, 1>(lengths, "lengths", {kAny});
  nb::gil_scoped_release release;
  gather_reuse(data, status.extent(0), status.extent(1), status.extent(2), requests, to, lengths.extent(0));
}

RecordsView records_view(const Tensor& records, const Tensor& counts, std::int64_t width, std::int64_t requests) {
  RecordsView view{};
  const std::int64_t buffered = records.extent(0);
  view.queries = records.extent(1);
  view.capacity = (width + kChunks - 1) / kChunks;
  view.records = data_of<std::int32_t, 5>(records, "records", {kAny, kAny, kChunks, view.capacity, kRecordInts});
  view.counts = data_of<std::int32_t, 3>(counts, "record_counts", {buffered, view.queries, kChunks});
  require_requests("records", records, requests);
  return view;
}

void py_conformance_plan(const Tensor& topk, const Tensor& query_start_loc, const Tensor& seq_lens,
                         const Tensor& rows, const ResidencyHandle& residency, std::int64_t id_range,
                         const Tensor& kinds, const Tensor& actual, const Tensor& records,
                         const Tensor& record_counts) {
  const RequestsView requests = requests_view(query_start_loc, rows);
  ConformancePlanView view{};
  view.topk = data_of<std::int32_t, 2>(topk, "topk", {kAny, kAny});
  view.tokens = topk.extent(0);
  view.width = topk.extent(1);
  view.id_range = id_range;
  view.seq_lens = data_of<std::int32_t, 1>(seq_lens, "seq_lens", {requests.count});
  view.kinds = data_of<std::int32_t, 3>(kinds, "kinds", {kAny, view.width, 2});
  view.actual = data_of<std::int32_t, 1>(actual, "actual", {kAny});
  require_tokens("kinds", kinds, "topk", view.tokens);
  require_tokens("actual", actual, "topk", view.tokens);
  const RecordsView record_lists = records_view(records, record_counts, view.width, requests.count);
  nb::gil_scoped_release release;
  conformance_plan(requests, residency.view, view, record_lists);
}

void py_conformance_install(const Tensor& query_start_loc, const Tensor& rows, const ResidencyHandle& residency,
                            std::int64_t id_range, std::int64_t width, const Tensor& records,
                            const Tensor& record_counts, const Tensor& miss_positions, const Tensor& miss_slots,
                            const Tensor& miss_counts, bool metadata_update) {
  const RequestsView requests = requests_view(query_start_loc, rows);
  const RecordsView record_lists = records_view(records, record_counts, width, requests.count);
  const std::int64_t buffered = miss_positions.extent(0);
  InstallListView list{};
  list.capacity = miss_positions.extent(1);
  list.positions = data_of<std::int32_t, 2>(miss_positions, "miss_positions", {kAny, kAny});
  list.slots = data_of<std::int32_t, 2>(miss_slots, "miss_slots", {buffered, list.capacity});
  list.counts = data_of<std::int32_t, 1>(miss_counts, "miss_counts", {buffered});
  require_requests("miss_positions", miss_positions, requests.count);
  const std::int64_t most = record_lists.queries * kChunks * record_lists.capacity;
  require(list.capacity >= most, "miss_positions: capacity ", list.capacity, " is less than the ", most,
          " records of a request");
  nb::gil_scoped_release release;
  conformance_install(requests, residency.view, record_lists, width, id_range, metadata_update, list);
}

void py_write_rows(const Tensor& hot, const Tensor& rows, const Tensor& new_rows, const Tensor& slots) {
  const HotPoolView hot_pool = hot_view(hot);
  const std::int64_t tokens = slots.extent(0);
  const auto* to_slots = data_of<std::int32_t, 1>(slots, "slots", {kAny});
  const auto* to_rows = data_of<std::int32_t, 1>(rows, "rows", {tokens});
  const auto* from = data_of<std::uint8_t, 2>(new_rows, "new_rows", {tokens, hot_pool.row_bytes});
  nb::gil_scoped_release release;
  write_rows(hot_pool, to_rows, from, to_slots, tokens);
}

void py_host_write(const Tensor& host, const Tensor& new_rows, const Tensor& slot_mapping) {
  const HostPoolView pool = host_view(host);
  const std::int64_t tokens = slot_mapping.extent(0);
  const auto* mapping = data_of<std::int64_t, 1>(slot_mapping, "slot_mapping", {kAny});
  const auto* from = data_of<std::uint8_t, 2>(new_rows, "new_rows", {tokens, pool.row_bytes});
  nb::gil_scoped_release release;
  host_write(pool, from, mapping, tokens);
}

void py_host_read(const Tensor& host, const Tensor& block_table, std::int64_t start, std::int64_t count,
                  const Tensor& dst) {
  const HostPoolView pool = host_view(host);
  const auto* table = data_of<std::int32_t, 1>(block_table, "block_table", {kAny});
  auto* to = data_of<std::uint8_t, 2>(dst, "dst", {kAny, pool.row_bytes});
  require(count <= dst.extent(0), "dst: ", dst.extent(0), " rows are too few for ", count, " tokens");
  nb::gil_scoped_release release;
  host_read(pool, table, block_table.extent(0), start, count, to);
}

RangesView ranges_view(const Tensor& ranges, const char* name) {
  return {data_of<std::int64_t, 2>(ranges, name, {kAny, 2}), ranges.extent(0)};
}

std::int64_t py_copy_spans(const Tensor& to, const Tensor& source, const Tensor& nbytes, const Tensor& to_ranges,
                           const Tensor& source_ranges) {
  SpansView spans{};
  spans.count = nbytes.extent(0);
  spans.nbytes = data_of<std::int64_t, 1>(nbytes, "nbytes", {kAny});
  spans.to = data_of<std::int64_t, 1>(to, "to", {spans.count});
  spans.from = data_of<std::int64_t, 1>(source, "source", {spans.count});
  const RangesView writable = ranges_view(to_ranges, "to_ranges");
  const RangesView readable = ranges_view(source_ranges, "source_ranges");
  nb::gil_scoped_release release;
  return copy_spans(spans, writable, readable);
}

std::vector<std::string> py_available_isas() {
  std::vector<std::string> names;
  for (Isa isa : available_isas()) names.emplace_back(isa_name(isa));
  return names;
}

}  // namespace
}  // namespace kvoffload

NB_MODULE(_C, m) {
  using namespace kvoffload;
  nb::class_<Workspace>(m, "Workspace").def(nb::init<>());
  nb::class_<ResidencyHandle>(m, "Residency")
      .def(nb::init<const Tensor&, const Tensor&, const Tensor&, const Tensor&, const std::string&, const std::string&>(),
           nb::arg("tags"), nb::arg("ages"), nb::arg("hands"), nb::arg("high"), nb::arg("policy"),
           nb::arg("placement") = "one_set");
  nb::class_<PlanOutHandle>(m, "PlanOut")
      .def(nb::init<const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                    const Tensor&, const Tensor&>(),
           nb::arg("slots"), nb::arg("new_slots"), nb::arg("miss_ids"), nb::arg("miss_slots"),
           nb::arg("miss_counts"), nb::arg("stats"), nb::arg("kinds"), nb::arg("miss_positions"));
  m.def("dsa_plan", py_plan, nb::arg("topk"), nb::arg("query_start_loc"), nb::arg("seq_lens"), nb::arg("rows"),
        nb::arg("residency"), nb::arg("out"), nb::arg("workspace"));
  m.def("dsa_serve", py_serve, nb::arg("host"), nb::arg("hot"), nb::arg("block_table"), nb::arg("rows"),
        nb::arg("miss_ids"), nb::arg("miss_slots"), nb::arg("miss_counts"));
  m.def("dsa_serve_compact", py_serve_compact, nb::arg("kinds"), nb::arg("query_start_loc"), nb::arg("seq_lens"),
        nb::arg("host"), nb::arg("hot"), nb::arg("block_table"), nb::arg("rows"), nb::arg("new_rows"),
        nb::arg("selection"));
  m.def("dsa_install", py_install, nb::arg("selection"), nb::arg("query_start_loc"), nb::arg("rows"),
        nb::arg("miss_positions"), nb::arg("miss_slots"), nb::arg("miss_counts"), nb::arg("hot"));
  m.def("gather_selection", py_gather, nb::arg("topk"), nb::arg("query_start_loc"), nb::arg("seq_lens"),
        nb::arg("rows"), nb::arg("host"), nb::arg("block_table"), nb::arg("new_rows"), nb::arg("selection"),
        nb::arg("status"), nb::arg("lengths"));
  m.def("gather_reuse", py_gather_reuse, nb::arg("status"), nb::arg("rows"), nb::arg("query_start_loc"),
        nb::arg("lengths"));
  m.def("conformance_plan", py_conformance_plan, nb::arg("topk"), nb::arg("query_start_loc"), nb::arg("seq_lens"),
        nb::arg("rows"), nb::arg("residency"), nb::arg("id_range"), nb::arg("kinds"), nb::arg("actual"),
        nb::arg("records"), nb::arg("record_counts"));
  m.def("conformance_install", py_conformance_install, nb::arg("query_start_loc"), nb::arg("rows"),
        nb::arg("residency"), nb::arg("id_range"), nb::arg("width"), nb::arg("records"), nb::arg("record_counts"),
        nb::arg("miss_positions"), nb::arg("miss_slots"), nb::arg("miss_counts"), nb::arg("metadata_update"));
  m.def("write_rows", py_write_rows, nb::arg("hot"), nb::arg("rows"), nb::arg("new_rows"), nb::arg("slots"));
  m.def("host_write", py_host_write, nb::arg("host"), nb::arg("new_rows"), nb::arg("slot_mapping"));
  m.def("host_read", py_host_read, nb::arg("host"), nb::arg("block_table"), nb::arg("start"), nb::arg("count"),
        nb::arg("dst"));
  m.def("copy_spans", py_copy_spans, nb::arg("to"), nb::arg("source"), nb::arg("nbytes"), nb::arg("to_ranges"),
        nb::arg("source_ranges"));
  m.def("policies", [] { return std::vector<std::string>(std::begin(kPolicyNames), std::end(kPolicyNames)); });
  m.def("set_isa", set_isa, nb::arg("name"));
  m.def("isa", [] { return std::string(isa_name(current_isa())); });
  m.def("available_isas", py_available_isas);
}
