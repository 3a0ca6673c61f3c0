// Random steps on the core without Python, for sanitizers. Each round simulates a few requests on one residency with
// real rows: after every step each attended row must be its token's, delivered in place, compact or gathered. Buffers
// are allocated exactly, so that a single byte out of bounds is seen. Damaged arguments must be refused, never crash.
// Every instruction set of the machine runs the same rounds and must write the same bytes.
//
//   ops_fuzz [rounds] [seed] [threads]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "compact.h"
#include "conformance.h"
#include "copies.h"
#include "gather.h"
#include "isa.h"
#include "plan.h"

using namespace kvoffload;

namespace {

constexpr std::int64_t kRowBytes = 12;
constexpr std::int64_t kBlockSize = 8;
constexpr std::int64_t kBlocksPerRow = 40;

void expect(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "ops_fuzz: %s\n", what);
  std::abort();
}

template <class Call>
void attempt(Call call) {
  try {
    call();
  } catch (const std::invalid_argument&) {
  }
}

using Ints = std::vector<std::int32_t>;

class Round {
 public:
  explicit Round(std::uint64_t seed) : random_(seed) {
    placement_ = below(2) ? Placement::kOneSet : Placement::kTwoSets;
    const std::int64_t sets_of_id = placement_ == Placement::kTwoSets ? 2 : 1;
    ways_ = (below(2) ? 16 : 32) / sets_of_id;
    sets_ = sets_of_id << below(4);
    query_len_ = 1 + below(4);
    width_ = 1 + below(ways_ * sets_ / query_len_);
    if (below(4) == 0) width_ = ways_ * sets_ / query_len_;
    rows_ = 1 + below(3);
    policy_ = static_cast<Policy>(below(kPolicyCount));
    const auto slots = static_cast<std::size_t>(rows_ * sets_ * ways_);
    tags_.assign(slots, -1);
    ages_.assign(slots, 0);
    hands_.assign(static_cast<std::size_t>(rows_ * sets_), 0);
    high_.assign(static_cast<std::size_t>(rows_), 0);
    hot_.assign(slots * kRowBytes, 0xee);
    host_.assign(static_cast<std::size_t>(rows_ * kBlocksPerRow * kBlockSize * kRowBytes), 0);
    versions_.assign(static_cast<std::size_t>(rows_ * kBlocksPerRow * kBlockSize), 0);
    stable_.assign(static_cast<std::size_t>(rows_), 0);
    compact_ = below(2) != 0;
    gathered_.assign(static_cast<std::size_t>(rows_ * query_len_ * width_ * kRowBytes), 0xee);
    status_.assign(static_cast<std::size_t>(rows_ * query_len_ * (width_ + 1)), 0);
  }

  // Returns a digest of everything the steps wrote.
  std::uint64_t run(int steps) {
    for (int i = 0; i < steps; ++i) {
      draw_step();
      if (below(8) == 0) {
        damaged();
      } else {
        step();
      }
    }
    return digest_;
  }

 private:
  std::int64_t below(std::int64_t limit) {
    return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(limit));
  }

  std::int32_t draw_id(std::int64_t seq_len) {
    switch (below(6)) {
      case 0: return static_cast<std::int32_t>(random_());
      case 1: return -1;
      case 2: return static_cast<std::int32_t>(seq_len - below(8) + 2);
      case 3: return static_cast<std::int32_t>(below(seq_len + 1) / sets_ * sets_);
      default: return static_cast<std::int32_t>(below(seq_len + 1));
    }
  }

  // Requests 0..rows-1 on rows 0..rows-1; some without tokens, some skipped.
  void draw_step() {
    topk_.clear();
    starts_.assign(1, 0);
    lengths_.clear();
    row_of_.clear();
    for (std::int64_t row = 0; row < rows_; ++row) {
      const auto at = static_cast<std::size_t>(row);
      if (below(6) == 0) stable_[at] = below(kBlocksPerRow * kBlockSize - query_len_);
      const std::int64_t q = below(8) == 0 ? 0 : 1 + below(query_len_);
      stable_[at] = std::min(stable_[at], kBlocksPerRow * kBlockSize - q);
      const std::int64_t seq_len = stable_[at] + q;
      for (std::int64_t i = 0; i < q * width_; ++i) topk_.push_back(draw_id(seq_len));
      starts_.push_back(static_cast<std::int32_t>(starts_.back() + q));
      lengths_.push_back(static_cast<std::int32_t>(seq_len));
      row_of_.push_back(below(10) == 0 ? -1 : static_cast<std::int32_t>(row));
    }
    tokens_ = starts_.back() + below(2);
    topk_.resize(static_cast<std::size_t>(tokens_ * width_), 3);
    topk_.shrink_to_fit();
    const auto tokens = static_cast<std::size_t>(tokens_);
    const auto misses = static_cast<std::size_t>(rows_ * query_len_ * width_);
    slots_.assign(tokens * static_cast<std::size_t>(width_), -9);
    new_slots_.assign(tokens, -9);
    miss_ids_.assign(misses, -9);
    miss_slots_.assign(misses, -9);
    miss_counts_.assign(static_cast<std::size_t>(rows_), -9);
    stats_.assign(kStatsCount, -9);
    kinds_.assign(2 * slots_.size(), -9);
    miss_positions_.assign(misses, -9);
    selection_.assign(slots_.size() * kRowBytes, 0xee);
    lengths_of_.assign(tokens, -9);
    new_rows_.assign(tokens * kRowBytes, 0);
    tables_.clear();
    for (std::int64_t i = 0; i < rows_ * kBlocksPerRow; ++i) tables_.push_back(static_cast<std::int32_t>(i));
  }

  PlanInput input() const {
    return {topk_.data(), starts_.data(), lengths_.data(), row_of_.data(), tokens_, width_, rows_};
  }
  ResidencyView residency() {
    return {tags_.data(), ages_.data(), hands_.data(), high_.data(), rows_, sets_, static_cast<int>(ways_), policy_,
            placement_};
  }
  PlanOutput output() {
    return {slots_.data(),       new_slots_.data(), miss_ids_.data(), miss_slots_.data(),  miss_counts_.data(),
            stats_.data(), tokens_,           rows_,            query_len_ * width_, width_,
            compact_ ? kinds_.data() : nullptr, compact_ ? miss_positions_.data() : nullptr};
  }
  RequestsView requests() const { return {starts_.data(), row_of_.data(), rows_}; }
  CompactView compact() {
    return {kinds_.data(), lengths_.data(), tables_.data(), new_rows_.data(), selection_.data(), tokens_, width_,
            kBlocksPerRow};
  }
  InstallView install() {
    return {selection_.data(), miss_positions_.data(), miss_slots_.data(), miss_counts_.data(), tokens_, width_,
            query_len_ * width_};
  }
  GatherView gather() {
    return {topk_.data(),   lengths_.data(), tables_.data(),     new_rows_.data(), gathered_.data(),
            status_.data(), lengths_of_.data(), tokens_, width_, kBlocksPerRow,    rows_, query_len_};
  }
  HostPoolView host() { return {host_.data(), rows_ * kBlocksPerRow, kBlockSize, kRowBytes}; }
  HotPoolView hot() { return {hot_.data(), rows_, sets_ * ways_, kRowBytes}; }
  MissView misses() {
    return {tables_.data(),      row_of_.data(), miss_ids_.data(), miss_slots_.data(), miss_counts_.data(), rows_,
            kBlocksPerRow, query_len_ * width_};
  }

  void step() {
    Ints token_rows;
    std::vector<std::int64_t> mapping;
    for (std::int64_t n = 0; n < rows_; ++n) prepare_request(n, token_rows, mapping);
    const auto count = static_cast<std::int64_t>(token_rows.size());
    host_write(host(), new_rows_.data(), mapping.data(), count);
    Workspace fresh;
    dsa_plan(input(), residency(), output(), below(2) ? fresh : kept_);
    if (compact_) {
      dsa_serve_compact(host(), hot(), requests(), compact());
      dsa_install(hot(), requests(), install());
    } else {
      dsa_serve(host(), hot(), misses());
    }
    const Ints token_slots(new_slots_.begin(), new_slots_.begin() + count);
    write_rows(hot(), token_rows.data(), new_rows_.data(), token_slots.data(), count);
    gather_selection(host(), requests(), gather());
    for (std::int64_t n = 0; n < rows_; ++n) check_request(n);
    conformance();
    digest();
  }

  template <class T>
  void digest(const std::vector<T>& values) {
    for (const T value : values) digest_ = (digest_ ^ static_cast<std::uint64_t>(value)) * 1099511628211u;
  }

  void digest() {
    for (const Ints* list : {&tags_, &high_, &slots_, &new_slots_, &miss_ids_, &miss_slots_, &miss_counts_,
                             &miss_positions_, &kinds_, &status_, &lengths_of_, &fifo_tags_}) {
      digest(*list);
    }
    for (const auto* bytes : {&ages_, &hands_, &hot_, &selection_, &gathered_, &fifo_hands_}) digest(*bytes);
    digest(stats_);
  }

  // Its own small residency: the mode needs 16 ways and fifo. Its results are compared elsewhere.
  void conformance() {
    const std::int64_t capacity = (width_ + kChunks - 1) / kChunks;
    const auto records = static_cast<std::size_t>(rows_ * query_len_ * kChunks * capacity);
    Ints record_list(records * kRecordInts, -9), counts(records / static_cast<std::size_t>(capacity), -9);
    Ints positions(records, -9), slots(records, -9), listed(static_cast<std::size_t>(rows_), -9);
    const RecordsView view{record_list.data(), counts.data(), query_len_, capacity};
    const ConformancePlanView plan{topk_.data(), lengths_.data(), kinds_.data(), lengths_of_.data(),
                                   tokens_,      width_,          1 + below(400)};
    if (fifo_tags_.empty()) {
      fifo_tags_.assign(static_cast<std::size_t>(rows_ * 32), -1);
      fifo_hands_.assign(static_cast<std::size_t>(rows_ * 2), 0);
    }
    const ResidencyView residency{fifo_tags_.data(), ages_.data(), fifo_hands_.data(), high_.data(), rows_, 2, 16,
                              Policy::kFifo};
    conformance_plan(requests(), residency, plan, view);
    if (below(2)) {
      for (std::int32_t& value : record_list) value = below(9) ? value : static_cast<std::int32_t>(random_());
      for (std::int32_t& value : counts) value = below(9) ? value : static_cast<std::int32_t>(random_());
    }
    const InstallListView list{positions.data(), slots.data(), listed.data(), query_len_ * kChunks * capacity};
    conformance_install(requests(), residency, view, width_, 400, below(2) != 0, list);
  }

  void prepare_request(std::int64_t n, Ints& token_rows, std::vector<std::int64_t>& mapping) {
    const auto at = static_cast<std::size_t>(n);
    const std::int64_t q = starts_[at + 1] - starts_[at];
    for (std::int64_t id = lengths_[at] - q; id < lengths_[at]; ++id) {
      const std::int64_t token = n * kBlocksPerRow * kBlockSize + id;
      if (row_of_[at] >= 0) versions_[static_cast<std::size_t>(token)] = ++version_;
      std::memcpy(new_rows_.data() + token_rows.size() * kRowBytes, &version_, sizeof version_);
      token_rows.push_back(row_of_[at]);
      mapping.push_back(row_of_[at] >= 0 ? token : -1);
    }
  }

  void check_request(std::int64_t n) {
    const auto at = static_cast<std::size_t>(n);
    const std::int64_t q = starts_[at + 1] - starts_[at];
    const std::int64_t stable = lengths_[at] - q;
    for (std::int64_t t = 0; t < q; ++t) {
      for (std::int64_t k = 0; k < width_; ++k) {
        const auto i = static_cast<std::size_t>((starts_[at] + t) * width_ + k);
        const bool valid = row_of_[at] >= 0 && topk_[i] >= 0 && topk_[i] <= stable + t;
        expect(valid == (slots_[i] >= 0), "a slot for exactly the valid positions");
        if (valid) check_row(n, topk_[i], hot_.data() + (n * sets_ * ways_ + slots_[i]) * kRowBytes);
        if (valid && compact_) check_row(n, topk_[i], selection_.data() + i * kRowBytes);
      }
      check_gathered(n, t);
    }
    if (row_of_[at] >= 0) stable_[at] = std::min(stable + below(q + 1), kBlocksPerRow * kBlockSize);
  }

  void check_gathered(std::int64_t n, std::int64_t t) {
    if (row_of_[static_cast<std::size_t>(n)] < 0) return;
    const std::int64_t query = n * query_len_ + t;
    const std::int32_t* status = status_.data() + query * (width_ + 1);
    for (std::int64_t place = 0; place < status[width_]; ++place) {
      check_row(n, status[place], gathered_.data() + (query * width_ + place) * kRowBytes);
    }
  }

  void check_row(std::int64_t row, std::int64_t id, const std::uint8_t* bytes) {
    std::int64_t held = 0;
    std::memcpy(&held, bytes, sizeof held);
    expect(held == versions_[static_cast<std::size_t>(row * kBlocksPerRow * kBlockSize + id)],
           "an attended row is its token's");
  }

  // Any value anywhere in the arguments: refused, or harmless. The residency is rebuilt afterwards.
  void damaged() {
    Ints* targets[] = {&topk_, &starts_, &lengths_, &row_of_};
    for (int i = 0; i < 3; ++i) {
      Ints& target = *targets[below(4)];
      if (target.empty()) continue;
      const std::int32_t values[] = {INT32_MIN, INT32_MAX, -1, 0, static_cast<std::int32_t>(below(1000))};
      target[static_cast<std::size_t>(below(static_cast<std::int64_t>(target.size())))] = values[below(5)];
    }
    for (std::uint8_t& age : ages_) age = static_cast<std::uint8_t>(random_());
    for (std::uint8_t& hand : hands_) hand = static_cast<std::uint8_t>(random_());
    attempt([&] { dsa_plan(input(), residency(), output(), kept_); });
    for (std::int32_t& value : miss_ids_) value = static_cast<std::int32_t>(below(400)) - 2;
    for (std::int32_t& value : miss_slots_) value = static_cast<std::int32_t>(below(sets_ * ways_));
    for (std::int32_t& value : miss_counts_) value = static_cast<std::int32_t>(below(query_len_ * width_ + 2));
    for (std::int32_t& value : miss_positions_) value = static_cast<std::int32_t>(below(query_len_ * width_));
    for (std::int32_t& value : kinds_) value = static_cast<std::int32_t>(below(below(20) ? 6 : 4000));
    for (std::int32_t& value : status_) value = below(3) ? value : static_cast<std::int32_t>(below(width_ + 2) - 1);
    attempt([&] { dsa_serve(host(), hot(), misses()); });
    attempt([&] { dsa_serve_compact(host(), hot(), requests(), compact()); });
    attempt([&] { dsa_install(hot(), requests(), install()); });
    attempt([&] { gather_selection(host(), requests(), gather()); });
    attempt([&] {
      gather_reuse(status_.data(), rows_, query_len_, width_ + 1, requests(), lengths_of_.data(), tokens_);
    });
    attempt([&] { conformance(); });
    attempt([&] { spans(); });
    std::fill(status_.begin(), status_.end(), 0);
    std::fill(tags_.begin(), tags_.end(), -1);
    std::fill(ages_.begin(), ages_.end(), 0);
    std::fill(hands_.begin(), hands_.end(), 0);
    std::fill(high_.begin(), high_.end(), 0);
  }

  // From the host pool to the hot pool, whose ranges have a gap: mostly inside, now and then anywhere.
  void spans() {
    const auto to = reinterpret_cast<std::int64_t>(hot_.data());
    const auto from = reinterpret_cast<std::int64_t>(host_.data());
    const auto to_end = static_cast<std::int64_t>(hot_.size());
    const auto from_end = static_cast<std::int64_t>(host_.size());
    const std::int64_t to_bounds[] = {to, to + to_end / 3, to + to_end / 3 + 5, to + to_end};
    const std::int64_t from_bounds[] = {from, from + from_end / 2, from + from_end / 2, from + from_end};
    std::vector<std::int64_t> columns[3];
    for (std::int64_t i = below(4); i >= 0; --i) {
      columns[0].push_back(to + below(to_end + 2) - 1);
      columns[1].push_back(from + below(from_end + 2) - 1);
      columns[2].push_back(below(12) ? below(40) : static_cast<std::int64_t>(random_()));
    }
    const SpansView view{columns[0].data(), columns[1].data(), columns[2].data(),
                         static_cast<std::int64_t>(columns[0].size())};
    copy_spans(view, {to_bounds, 2}, {from_bounds, 2});
  }

  std::mt19937_64 random_;
  std::int64_t ways_, sets_, query_len_, width_, rows_, tokens_ = 0, version_ = 0;
  std::uint64_t digest_ = 14695981039346656037u;
  Policy policy_;
  Placement placement_;
  bool compact_ = false;
  Workspace kept_;
  Ints tags_, high_, topk_, starts_, lengths_, row_of_, slots_, new_slots_, miss_ids_, miss_slots_, miss_counts_,
      tables_, kinds_, miss_positions_, status_, lengths_of_, fifo_tags_;
  std::vector<std::uint8_t> ages_, hands_, hot_, host_, selection_, gathered_, new_rows_, fifo_hands_;
  std::vector<std::int64_t> stats_, versions_, stable_;
};

void fuzz(int rounds, std::uint64_t seed, std::uint64_t* digest) {
  for (int i = 0; i < rounds; ++i) *digest = *digest * 31 + Round(seed + static_cast<std::uint64_t>(i)).run(12);
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 500;
  const std::uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  const int threads = argc > 3 ? std::atoi(argv[3]) : 1;
  std::vector<std::uint64_t> expected;
  for (Isa isa : available_isas()) {
    set_isa(std::string(isa_name(isa)));
    std::vector<std::uint64_t> digests(static_cast<std::size_t>(threads), 0);
    std::vector<std::thread> workers;
    for (int i = 0; i < threads; ++i) {
      workers.emplace_back(fuzz, rounds, seed + static_cast<std::uint64_t>(i) * 1000003,
                           &digests[static_cast<std::size_t>(i)]);
    }
    for (std::thread& worker : workers) worker.join();
    if (expected.empty()) expected = digests;
    expect(digests == expected, "all instruction sets write the same bytes");
    std::printf("%s: %d rounds on %d threads\n", std::string(isa_name(isa)).c_str(), rounds, threads);
  }
  return 0;
}
