// HCCL's C API (libhccl.so) between processes of one machine, over a segment of shared memory for each communicator.
//
// A collective is a task of the stream that it is given. Every rank publishes its send buffer in chunks; between two
// barriers all ranks read what they need of a chunk. Reductions add in the order of the ranks, in float for 16-bit
// types, so that all ranks get the same bits.
#include <acl/acl.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "arena.h"
#include "stream.h"
#include "third_party/hccl/inc/hccl/hccl.h"

namespace {

constexpr uint32_t kMostRanks = 64;
constexpr size_t kChunk = size_t{1} << 20;
constexpr auto kPatience = std::chrono::seconds(600);

struct Slot {
  std::atomic<uint64_t> bytes;         // of this rank's send buffer in the current collective
  uint64_t offsets[kMostRanks];        // all to all: where each rank's part starts
  std::atomic<uint32_t> mail[kMostRanks];  // for each sender: whether letter[sender] is full
  char data[kChunk];
};

struct Segment {
  std::atomic<uint32_t> joined;
  std::atomic<uint32_t> arrived;
  std::atomic<uint32_t> generation;
  Slot slots[1];
};

void await(const std::function<bool()> &ready, const char *what) {
  auto limit = std::chrono::steady_clock::now() + kPatience;
  for (int round = 0; !ready(); round++) {
    if (round < 200)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    if (std::chrono::steady_clock::now() > limit) throw std::runtime_error(std::string("HCCL: no rank answers: ") + what);
  }
}

class Communicator {
 public:
  Communicator(const std::string &name, uint32_t ranks, uint32_t rank) : ranks(ranks), rank(rank), name_(name) {
    letters_ = sizeof(Segment) + sizeof(Slot) * ranks;
    bytes_ = letters_ + kChunk * ranks * ranks;
    int file = shm_open(name_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes_)) != 0) throw std::runtime_error("HCCL: no shared memory");
    void *place = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    close(file);
    if (place == MAP_FAILED) throw std::runtime_error("HCCL: mmap");
    segment_ = static_cast<Segment *>(place);
    segment_->joined++;
    await([this] { return segment_->joined >= this->ranks; }, "joining");
    if (rank == 0) shm_unlink(name_.c_str());
  }
  ~Communicator() { munmap(segment_, bytes_); }
  Communicator(const Communicator &) = delete;
  Communicator &operator=(const Communicator &) = delete;

  using Reader = std::function<void(uint32_t from, size_t offset, const char *data, size_t bytes)>;

  // Every rank sees all chunks of all ranks' send buffers, rank after rank for each offset.
  void exchange(const void *send, size_t bytes, const Reader &read, const std::vector<uint64_t> &offsets = {}) {
    const char *source = static_cast<const char *>(npu::host_view(send));
    Slot &mine = segment_->slots[rank];
    mine.bytes = bytes;
    std::copy(offsets.begin(), offsets.end(), mine.offsets);
    barrier();
    size_t longest = 0;
    for (uint32_t r = 0; r < ranks; r++) longest = std::max<size_t>(longest, segment_->slots[r].bytes);
    for (size_t at = 0; at < longest; at += kChunk) {
      if (at < bytes) std::memcpy(mine.data, source + at, std::min(kChunk, bytes - at));
      barrier();
      for (uint32_t r = 0; r < ranks; r++) {
        size_t theirs = segment_->slots[r].bytes;
        if (at < theirs) read(r, at, segment_->slots[r].data, std::min(kChunk, theirs - at));
      }
      barrier();
    }
    barrier();
  }

  uint64_t offset_of(uint32_t from, uint32_t part) const { return segment_->slots[from].offsets[part]; }

  void send(const void *buffer, size_t bytes, uint32_t to) {
    const char *source = static_cast<const char *>(npu::host_view(buffer));
    auto &full = segment_->slots[to].mail[rank];
    for (size_t at = 0; at < bytes; at += kChunk) {
      await([&] { return full == 0; }, "send");
      std::memcpy(letter(rank, to), source + at, std::min(kChunk, bytes - at));
      full = 1;
    }
  }

  void receive(void *buffer, size_t bytes, uint32_t from) {
    char *target = static_cast<char *>(npu::host_view(buffer));
    auto &full = segment_->slots[rank].mail[from];
    for (size_t at = 0; at < bytes; at += kChunk) {
      await([&] { return full == 1; }, "receive");
      std::memcpy(target + at, letter(from, rank), std::min(kChunk, bytes - at));
      full = 0;
    }
  }

  void barrier() {
    uint32_t generation = segment_->generation;
    if (++segment_->arrived == ranks) {
      segment_->arrived = 0;
      segment_->generation++;
    } else {
      await([&] { return segment_->generation != generation; }, "barrier");
    }
  }

  const uint32_t ranks, rank;

 private:
  char *letter(uint32_t from, uint32_t to) const {
    return reinterpret_cast<char *>(segment_) + letters_ + kChunk * (from * ranks + to);
  }

  std::string name_;
  Segment *segment_ = nullptr;
  size_t letters_ = 0, bytes_ = 0;
};

Communicator &of(HcclComm comm) { return *static_cast<Communicator *>(comm); }

size_t item_bytes(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_UINT8:
    case HCCL_DATA_TYPE_HIF8:
    case HCCL_DATA_TYPE_FP8E4M3:
    case HCCL_DATA_TYPE_FP8E5M2:
    case HCCL_DATA_TYPE_FP8E8M0:
      return 1;
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_UINT16:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_BFP16:
      return 2;
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_UINT32:
    case HCCL_DATA_TYPE_FP32:
      return 4;
    case HCCL_DATA_TYPE_INT128:
      return 16;
    default:
      return 8;
  }
}

template <typename T, typename Wide>
void combine(std::vector<char> &sums, const char *data, size_t bytes, bool first, HcclReduceOp op) {
  size_t count = bytes / sizeof(T);
  sums.resize(count * sizeof(Wide));
  Wide *sum = reinterpret_cast<Wide *>(sums.data());
  const T *values = reinterpret_cast<const T *>(data);
  for (size_t n = 0; n < count; n++) {
    Wide value = static_cast<Wide>(values[n]);
    if (first)
      sum[n] = value;
    else if (op == HCCL_REDUCE_SUM)
      sum[n] = static_cast<Wide>(sum[n] + value);
    else if (op == HCCL_REDUCE_PROD)
      sum[n] = static_cast<Wide>(sum[n] * value);
    else if (op == HCCL_REDUCE_MAX)
      sum[n] = std::max(sum[n], value);
    else
      sum[n] = std::min(sum[n], value);
  }
}

template <typename T, typename Wide>
void store(const std::vector<char> &sums, char *target) {
  const Wide *sum = reinterpret_cast<const Wide *>(sums.data());
  T *values = reinterpret_cast<T *>(target);
  for (size_t n = 0; n < sums.size() / sizeof(Wide); n++) values[n] = static_cast<T>(sum[n]);
}

struct Arithmetic {
  void (*combine)(std::vector<char> &, const char *, size_t, bool, HcclReduceOp);
  void (*store)(const std::vector<char> &, char *);
};

template <typename T, typename Wide = T>
Arithmetic arithmetic() {
  return {combine<T, Wide>, store<T, Wide>};
}

Arithmetic arithmetic_of(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
      return arithmetic<int8_t>();
    case HCCL_DATA_TYPE_UINT8:
      return arithmetic<uint8_t>();
    case HCCL_DATA_TYPE_INT16:
      return arithmetic<int16_t>();
    case HCCL_DATA_TYPE_INT32:
      return arithmetic<int32_t>();
    case HCCL_DATA_TYPE_INT64:
      return arithmetic<int64_t>();
    case HCCL_DATA_TYPE_FP32:
      return arithmetic<float>();
    case HCCL_DATA_TYPE_FP64:
      return arithmetic<double>();
    case HCCL_DATA_TYPE_FP16:
      return arithmetic<c10::Half, float>();
    case HCCL_DATA_TYPE_BFP16:
      return arithmetic<c10::BFloat16, float>();
    default:
      throw std::runtime_error("HCCL: no reduction of this data type");
  }
}

// Reduces the send buffers; what lies within [start, start + bytes) goes to ``target``.
void reduce(Communicator &comm, const void *send, size_t all, void *target, size_t start, size_t bytes,
            HcclDataType type, HcclReduceOp op) {
  Arithmetic kind = arithmetic_of(type);
  char *out = static_cast<char *>(npu::host_view(target));
  std::vector<char> sums;
  comm.exchange(send, all, [&](uint32_t from, size_t offset, const char *data, size_t length) {
    size_t first = std::max(offset, start), last = std::min(offset + length, start + bytes);
    if (first >= last) return;
    kind.combine(sums, data + (first - offset), last - first, from == 0, op);
    if (from + 1 == comm.ranks) kind.store(sums, out + (first - start));
  });
}

// Every rank takes part ``mine`` of each sender's buffer: counts and places in bytes.
void all_to_all(Communicator &comm, const void *send, const std::vector<uint64_t> &send_bytes,
                const std::vector<uint64_t> &send_at, void *receive, const std::vector<uint64_t> &receive_bytes,
                const std::vector<uint64_t> &receive_at) {
  size_t all = 0;
  for (uint32_t r = 0; r < comm.ranks; r++) all = std::max<size_t>(all, send_at[r] + send_bytes[r]);
  char *out = static_cast<char *>(npu::host_view(receive));
  auto read = [&](uint32_t from, size_t offset, const char *data, size_t length) {
    size_t start = comm.offset_of(from, comm.rank);
    size_t first = std::max(offset, start);
    size_t last = std::min<size_t>(offset + length, start + receive_bytes[from]);
    if (first < last) std::memcpy(out + receive_at[from] + (first - start), data + (first - offset), last - first);
  };
  comm.exchange(send, all, read, send_at);
}

std::vector<uint64_t> in_bytes(const void *counts, uint32_t ranks, size_t item) {
  const uint64_t *values = static_cast<const uint64_t *>(counts);
  std::vector<uint64_t> found(values, values + ranks);
  for (uint64_t &value : found) value *= item;
  return found;
}

HcclResult queue(aclrtStream stream, npu::Task task) {
  if (stream == nullptr) return HCCL_E_PTR;
  static_cast<npu::Stream *>(stream)->submit(std::move(task));
  return HCCL_SUCCESS;
}

HcclResult join(const std::string &name, uint32_t ranks, uint32_t rank, HcclComm *comm) {
  if (ranks > kMostRanks || rank >= ranks) return HCCL_E_PARA;
  try {
    *comm = new Communicator(name, ranks, rank);
  } catch (const std::exception &error) {
    std::fprintf(stderr, "npu_emulator: %s\n", error.what());
    return HCCL_E_INTERNAL;
  }
  return HCCL_SUCCESS;
}

}  // namespace

extern "C" {

HcclResult HcclGetRootInfo(HcclRootInfo *info) {
  static std::atomic<unsigned> number{0};
  auto ticks = std::chrono::steady_clock::now().time_since_epoch().count();
  *info = {};
  std::snprintf(info->internal, sizeof info->internal, "/npu-hccl-%d-%u-%lld", getpid(), number++,
                static_cast<long long>(ticks));
  return HCCL_SUCCESS;
}
HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo *info, uint32_t rank, HcclComm *comm) {
  return join(info->internal, ranks, rank, comm);
}
HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo *info, uint32_t rank,
                                      const HcclCommConfig *, HcclComm *comm) {
  return join(info->internal, ranks, rank, comm);
}
HcclResult HcclCommDestroy(HcclComm comm) {
  delete static_cast<Communicator *>(comm);
  return HCCL_SUCCESS;
}
HcclResult HcclGetCommAsyncError(HcclComm, HcclResult *error) {
  *error = HCCL_SUCCESS;
  return HCCL_SUCCESS;
}
const char *HcclGetErrorString(HcclResult) { return "npu_emulator: see the standard error output"; }
HcclResult HcclGetCommName(HcclComm comm, char *name) {
  std::snprintf(name, COMM_NAME_MAX_LENGTH, "emulated-%p", comm);
  return HCCL_SUCCESS;
}
HcclResult HcclGetRankSize(HcclComm comm, uint32_t *ranks) {
  *ranks = of(comm).ranks;
  return HCCL_SUCCESS;
}
HcclResult HcclGetRankId(HcclComm comm, uint32_t *rank) {
  *rank = of(comm).rank;
  return HCCL_SUCCESS;
}
HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }
HcclResult HcclBarrier(HcclComm comm, aclrtStream stream) {
  return queue(stream, [comm] { of(comm).barrier(); });
}

HcclResult HcclAllReduce(void *send, void *receive, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm,
                         aclrtStream stream) {
  size_t bytes = count * item_bytes(type);
  return queue(stream, [=] { reduce(of(comm), send, bytes, receive, 0, bytes, type, op); });
}
HcclResult HcclReduce(void *send, void *receive, uint64_t count, HcclDataType type, HcclReduceOp op, uint32_t root,
                      HcclComm comm, aclrtStream stream) {
  size_t bytes = count * item_bytes(type), wanted = of(comm).rank == root ? bytes : 0;
  return queue(stream, [=] { reduce(of(comm), send, bytes, receive, 0, wanted, type, op); });
}
HcclResult HcclReduceScatter(void *send, void *receive, uint64_t count, HcclDataType type, HcclReduceOp op,
                             HcclComm comm, aclrtStream stream) {
  size_t part = count * item_bytes(type);
  Communicator &group = of(comm);
  return queue(stream, [=, &group] {
    reduce(group, send, part * group.ranks, receive, part * group.rank, part, type, op);
  });
}
HcclResult HcclAllGather(void *send, void *receive, uint64_t count, HcclDataType type, HcclComm comm,
                         aclrtStream stream) {
  size_t bytes = count * item_bytes(type);
  return queue(stream, [=] {
    char *out = static_cast<char *>(npu::host_view(receive));
    of(comm).exchange(send, bytes, [&](uint32_t from, size_t offset, const char *data, size_t length) {
      std::memcpy(out + from * bytes + offset, data, length);
    });
  });
}
HcclResult HcclAllGatherV(void *send, uint64_t count, void *receive, const void *counts, const void *places,
                          HcclDataType type, HcclComm comm, aclrtStream stream) {
  size_t item = item_bytes(type), bytes = count * item;
  (void)counts;
  auto starts = in_bytes(places, of(comm).ranks, item);
  return queue(stream, [=] {
    char *out = static_cast<char *>(npu::host_view(receive));
    of(comm).exchange(send, bytes, [&](uint32_t from, size_t offset, const char *data, size_t length) {
      std::memcpy(out + starts[from] + offset, data, length);
    });
  });
}
HcclResult HcclBroadcast(void *buffer, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm,
                         aclrtStream stream) {
  size_t bytes = count * item_bytes(type);
  return queue(stream, [=] {
    Communicator &group = of(comm);
    char *out = static_cast<char *>(npu::host_view(buffer));
    bool sends = group.rank == root;
    group.exchange(buffer, sends ? bytes : 0, [&](uint32_t, size_t offset, const char *data, size_t length) {
      if (!sends) std::memcpy(out + offset, data, length);
    });
  });
}
HcclResult HcclScatter(void *send, void *receive, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm,
                       aclrtStream stream) {
  size_t part = count * item_bytes(type);
  return queue(stream, [=] {
    Communicator &group = of(comm);
    std::vector<uint64_t> none(group.ranks, 0), all(group.ranks, part), at(group.ranks, 0), from_root(none);
    for (uint32_t r = 0; r < group.ranks; r++) at[r] = part * r;
    from_root[root] = part;
    bool sends = group.rank == root;
    all_to_all(group, send, sends ? all : none, sends ? at : none, receive, from_root, none);
  });
}
HcclResult HcclAlltoAll(const void *send, uint64_t send_count, HcclDataType send_type, const void *receive, uint64_t,
                        HcclDataType, HcclComm comm, aclrtStream stream) {
  size_t part = send_count * item_bytes(send_type);
  return queue(stream, [=] {
    Communicator &group = of(comm);
    std::vector<uint64_t> all(group.ranks, part), at(group.ranks, 0);
    for (uint32_t r = 0; r < group.ranks; r++) at[r] = part * r;
    all_to_all(group, send, all, at, const_cast<void *>(receive), all, at);
  });
}
HcclResult HcclAlltoAllV(const void *send, const void *send_counts, const void *send_places, HcclDataType send_type,
                         const void *receive, const void *counts, const void *places, HcclDataType type,
                         HcclComm comm, aclrtStream stream) {
  uint32_t ranks = of(comm).ranks;
  auto sizes = in_bytes(send_counts, ranks, item_bytes(send_type));
  auto starts = in_bytes(send_places, ranks, item_bytes(send_type));
  auto wanted = in_bytes(counts, ranks, item_bytes(type)), targets = in_bytes(places, ranks, item_bytes(type));
  return queue(stream, [=] { all_to_all(of(comm), send, sizes, starts, const_cast<void *>(receive), wanted, targets); });
}
HcclResult HcclSend(void *buffer, uint64_t count, HcclDataType type, uint32_t to, HcclComm comm, aclrtStream stream) {
  size_t bytes = count * item_bytes(type);
  return queue(stream, [=] { of(comm).send(buffer, bytes, to); });
}
HcclResult HcclRecv(void *buffer, uint64_t count, HcclDataType type, uint32_t from, HcclComm comm, aclrtStream stream) {
  size_t bytes = count * item_bytes(type);
  return queue(stream, [=] { of(comm).receive(buffer, bytes, from); });
}
HcclResult HcclBatchSendRecv(HcclSendRecvItem *items, uint32_t count, HcclComm comm, aclrtStream stream) {
  std::vector<HcclSendRecvItem> all(items, items + count);
  return queue(stream, [=] {  // sends and receives side by side: two ranks may send to each other first
    std::thread sender([&] {
      for (const auto &item : all)
        if (item.sendRecvType == HCCL_SEND) of(comm).send(item.buf, item.count * item_bytes(item.dataType), item.remoteRank);
    });
    for (const auto &item : all)
      if (item.sendRecvType == HCCL_RECV)
        of(comm).receive(item.buf, item.count * item_bytes(item.dataType), item.remoteRank);
    sender.join();
  });
}

}  // extern "C"
