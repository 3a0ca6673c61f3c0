#include "arena.h"

#include <execinfo.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace npu {
namespace {

constexpr size_t kPage = 4096;

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

long setting(const char *name, long otherwise) {
  const char *text = std::getenv(name);
  return text != nullptr && *text != '\0' ? std::strtol(text, nullptr, 10) : otherwise;
}

bool guard_on() { return setting("NPU_EMULATOR_GUARD", 0) != 0; }

struct Arena {
  int file = -1;
  size_t bytes = 0;
  char *view = nullptr;    // for the emulator
  char *device = nullptr;  // what programs see
  size_t used = 0;
  std::map<size_t, size_t> taken;  // offset -> length
};

struct Import {
  char *device = nullptr;
  char *view = nullptr;
  size_t bytes = 0;
  int owner = 0;
};

std::mutex lock;
std::vector<Arena> arenas;
std::map<std::string, Import> imports;
std::map<const char *, size_t> pinned;  // start -> length
struct sigaction previous_action;

void forbidden_access(int number, siginfo_t *info, void *context) {
  if (device_of(info->si_addr) >= 0) {
    char line[200];
    int length = std::snprintf(line, sizeof line,
                               "npu_emulator: host code touches device memory at %p without a copy; from:\n",
                               info->si_addr);
    if (write(STDERR_FILENO, line, static_cast<size_t>(length)) < 0) _exit(139);
    void *frames[40];
    backtrace_symbols_fd(frames, backtrace(frames, 40), STDERR_FILENO);
  }
  sigaction(SIGSEGV, &previous_action, nullptr);  // the access is repeated and meets what was there before
  (void)number;
  (void)context;
}

void watch_for_forbidden_accesses() {
  void *frames[1];
  backtrace(frames, 1);  // loads what a signal handler must not load
  struct sigaction action = {};
  action.sa_sigaction = forbidden_access;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, &previous_action);
}

char *map(int file, size_t bytes, int protection) {
  void *place = mmap(nullptr, bytes, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
  if (place == MAP_FAILED) {
    std::perror("npu_emulator: mmap");
    std::abort();
  }
  return static_cast<char *>(place);
}

void make_arenas() {
  if (!arenas.empty()) return;
  arenas.resize(static_cast<size_t>(device_count()));
  for (Arena &arena : arenas) {
    arena.bytes = static_cast<size_t>(setting("NPU_EMULATOR_MEMORY_MB", 4096)) << 20;
    arena.file = memfd_create("npu_emulator", MFD_CLOEXEC);
    if (arena.file < 0 || ftruncate(arena.file, static_cast<off_t>(arena.bytes)) != 0) {
      std::perror("npu_emulator: memfd");
      std::abort();
    }
    arena.view = map(arena.file, arena.bytes, PROT_READ | PROT_WRITE);
    arena.device = guard_on() ? map(arena.file, arena.bytes, PROT_NONE) : arena.view;
  }
  if (guard_on()) watch_for_forbidden_accesses();
}

bool within(const void *address, const char *start, size_t bytes) {
  const char *place = static_cast<const char *>(address);
  return start != nullptr && place >= start && place < start + bytes;
}

}  // namespace

int device_count() { return static_cast<int>(setting("NPU_EMULATOR_DEVICES", 2)); }

void *device_allocate(int device, size_t bytes) {
  std::lock_guard<std::mutex> hold(lock);
  make_arenas();
  Arena &arena = arenas.at(static_cast<size_t>(device));
  size_t length = round_up(bytes + 32, kPage), start = 0;
  for (const auto &range : arena.taken) {
    if (range.first - start >= length) break;
    start = range.first + range.second;
  }
  if (start + length > arena.bytes) return nullptr;
  arena.taken[start] = length;
  arena.used += length;
  return arena.device + start;
}

bool device_free(void *address) {
  std::lock_guard<std::mutex> hold(lock);
  for (Arena &arena : arenas) {
    if (!within(address, arena.device, arena.bytes)) continue;
    auto found = arena.taken.find(static_cast<size_t>(static_cast<char *>(address) - arena.device));
    if (found == arena.taken.end()) return false;
    if (fallocate(arena.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(found->first),
                  static_cast<off_t>(found->second)) != 0)
      std::perror("npu_emulator: fallocate");
    arena.used -= found->second;
    arena.taken.erase(found);
    return true;
  }
  return false;
}

void memory_info(int device, size_t *free_bytes, size_t *total_bytes) {
  std::lock_guard<std::mutex> hold(lock);
  make_arenas();
  const Arena &arena = arenas.at(static_cast<size_t>(device));
  *total_bytes = arena.bytes;
  *free_bytes = arena.bytes - arena.used;
}

int device_of(const void *address) {
  for (size_t n = 0; n < arenas.size(); n++)
    if (within(address, arenas[n].device, arenas[n].bytes)) return static_cast<int>(n);
  for (const auto &item : imports)
    if (within(address, item.second.device, item.second.bytes)) return item.second.owner;
  return -1;
}

void *host_view(const void *address) {
  for (const Arena &arena : arenas)
    if (within(address, arena.device, arena.bytes))
      return arena.view + (static_cast<const char *>(address) - arena.device);
  std::lock_guard<std::mutex> hold(lock);
  for (const auto &item : imports)
    if (within(address, item.second.device, item.second.bytes))
      return item.second.view + (static_cast<const char *>(address) - item.second.device);
  return const_cast<void *>(address);
}

size_t live_allocations(size_t *bytes) {
  std::lock_guard<std::mutex> hold(lock);
  size_t count = 0;
  *bytes = 0;
  for (const Arena &arena : arenas) {
    count += arena.taken.size();
    *bytes += arena.used;
  }
  return count;
}

void *pinned_allocate(size_t bytes) {
  size_t length = round_up(bytes == 0 ? 1 : bytes, kPage);
  void *place = std::aligned_alloc(kPage, length);
  if (place != nullptr) pinned_register(place, length);
  return place;
}

bool pinned_free(void *address) {
  bool known = pinned_unregister(address);
  if (known) std::free(address);
  return known;
}

bool pinned_register(void *address, size_t bytes) {
  std::lock_guard<std::mutex> hold(lock);
  return pinned.emplace(static_cast<const char *>(address), bytes).second;
}

bool pinned_unregister(void *address) {
  std::lock_guard<std::mutex> hold(lock);
  return pinned.erase(static_cast<const char *>(address)) > 0;
}

bool is_pinned(const void *address) {
  std::lock_guard<std::mutex> hold(lock);
  auto after = pinned.upper_bound(static_cast<const char *>(address));
  if (after == pinned.begin()) return false;
  --after;
  return within(address, after->first, after->second);
}

bool export_range(const void *address, size_t bytes, char *key, size_t key_bytes) {
  std::lock_guard<std::mutex> hold(lock);
  for (size_t n = 0; n < arenas.size(); n++) {
    const Arena &arena = arenas[n];
    if (!within(address, arena.device, arena.bytes)) continue;
    int length = std::snprintf(key, key_bytes, "npu-%d-%d-%zu-%zu-%zu", getpid(), arena.file, n,
                               static_cast<size_t>(static_cast<const char *>(address) - arena.device), bytes);
    return length > 0 && static_cast<size_t>(length) < key_bytes;
  }
  return false;
}

void *import_range(const char *key) {
  int process = 0, file = 0;
  size_t device = 0, offset = 0, bytes = 0;
  if (std::sscanf(key, "npu-%d-%d-%zu-%zu-%zu", &process, &file, &device, &offset, &bytes) != 5) return nullptr;
  std::lock_guard<std::mutex> hold(lock);
  make_arenas();
  std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(file);
  int theirs = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (theirs < 0) return nullptr;
  size_t span = offset + bytes;
  Import item;
  item.view = map(theirs, span, PROT_READ | PROT_WRITE);
  item.device = guard_on() ? map(theirs, span, PROT_NONE) : item.view;
  item.bytes = span;
  item.owner = static_cast<int>(device);
  close(theirs);
  auto known = imports.find(key);
  if (known != imports.end()) return nullptr;  // one import of a key, as on a device
  imports[key] = item;
  return item.device + offset;
}

bool close_range(const char *key) {
  std::lock_guard<std::mutex> hold(lock);
  auto found = imports.find(key);
  if (found == imports.end()) return false;
  if (found->second.device != found->second.view) munmap(found->second.device, found->second.bytes);
  munmap(found->second.view, found->second.bytes);
  imports.erase(found);
  return true;
}

}  // namespace npu

extern "C" void *npu_emulator_host_view(const void *address) { return npu::host_view(address); }
