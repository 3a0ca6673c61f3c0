/* Stand-ins for the parts of CANN that MemFabric loads, over ordinary memory: enough for its host protocols.
 *
 * A device is a number, a stream has always finished, and a copy is memcpy. Names that are not here are made to
 * fail by generated code (see __init__.py): whatever needs real hardware says so and returns an error.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { kOk = 0, kFailed = 507899, kPageBytes = 4096 };

static __thread int32_t current_device;

/* ---- devices and streams ---- */

int32_t aclrtSetDevice(int32_t device) {
  current_device = device;
  return kOk;
}

int32_t aclrtGetDevice(int32_t *device) {
  *device = current_device;
  return kOk;
}

int32_t aclrtGetPhyDevIdByLogicDevId(int32_t logical, int32_t *physical) {
  *physical = logical;
  return kOk;
}

int32_t rtGetLogicDevIdByUserDevId(int32_t user, int32_t *logical) {
  *logical = user;
  return kOk;
}

int32_t rtGetDeviceInfo(uint32_t device, int32_t module, int32_t info, int64_t *value) {
  (void)device, (void)module, (void)info;
  *value = 0;
  return kOk;
}

int32_t rtDeviceGetBareTgid(uint32_t *process) {
  *process = (uint32_t)getpid();
  return kOk;
}

const char *aclrtGetSocName(void) { return "Ascend910B1"; }

int32_t aclrtCreateStream(void **stream) {
  *stream = &current_device; /* any address that is not null */
  return kOk;
}

int32_t aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flags) {
  (void)priority, (void)flags;
  return aclrtCreateStream(stream);
}

int32_t aclrtDestroyStream(void *stream) {
  (void)stream;
  return kOk;
}

int32_t aclrtSynchronizeStream(void *stream) {
  (void)stream;
  return kOk;
}

/* ---- memory ---- */

int32_t aclrtMallocHost(void **memory, size_t bytes) {
  return posix_memalign(memory, kPageBytes, bytes) == 0 ? kOk : kFailed;
}

int32_t aclrtFreeHost(void *memory) {
  free(memory);
  return kOk;
}

/* A driver allocation, which is freed by its address alone: the length stands in a page before it. */
int32_t halMemAlloc(void **memory, unsigned long long bytes, unsigned long long flags) {
  (void)flags;
  char *area = mmap(NULL, bytes + kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (area == MAP_FAILED) return kFailed;
  *(unsigned long long *)area = bytes + kPageBytes;
  *memory = area + kPageBytes;
  return kOk;
}

int32_t halMemFree(void *memory) {
  char *area = (char *)memory - kPageBytes;
  return munmap(area, *(unsigned long long *)area) == 0 ? kOk : kFailed;
}

int32_t halHostRegister(void *memory, uint64_t bytes, uint32_t flags, uint32_t device, void **mapped) {
  (void)bytes, (void)flags, (void)device;
  if (mapped != NULL) *mapped = memory;
  return kOk;
}

int32_t halHostUnregisterEx(void *memory, uint32_t device, uint32_t flags) {
  (void)memory, (void)device, (void)flags;
  return kOk;
}

/* ---- copies ---- */

int32_t aclrtMemcpy(void *to, size_t room, const void *from, size_t bytes, uint32_t kind) {
  (void)kind;
  if (bytes > room) return kFailed;
  memcpy(to, from, bytes);
  return kOk;
}

int32_t aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t bytes, uint32_t kind, void *stream) {
  (void)stream;
  return aclrtMemcpy(to, room, from, bytes, kind);
}

int32_t rtMemcpyAsyncWithoutCheckKind(void *to, size_t room, const void *from, size_t bytes, uint32_t kind,
                                      void *stream) {
  return aclrtMemcpyAsync(to, room, from, bytes, kind, stream);
}

int32_t aclrtMemset(void *memory, size_t room, int32_t value, size_t bytes) {
  if (bytes > room) return kFailed;
  memset(memory, value, bytes);
  return kOk;
}

int32_t aclrtMemcpy2d(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                      uint32_t kind) {
  (void)kind;
  for (size_t row = 0; row < height; ++row) {
    memcpy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
  }
  return kOk;
}

int32_t aclrtMemcpy2dAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                           size_t height, uint32_t kind, void *stream) {
  (void)stream;
  return aclrtMemcpy2d(to, to_pitch, from, from_pitch, width, height, kind);
}

int32_t aclrtMemcpyBatch(void **to, size_t *room, void **from, size_t *bytes, size_t count, void *attributes,
                         size_t *indexes, size_t attribute_count, size_t *failed) {
  (void)attributes, (void)indexes, (void)attribute_count;
  for (size_t i = 0; i < count; ++i) {
    if (aclrtMemcpy(to[i], room[i], from[i], bytes[i], 0) != kOk) {
      *failed = i;
      return kFailed;
    }
  }
  return kOk;
}
