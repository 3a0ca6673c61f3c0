// Memory of the emulated devices.
//
// Each device's memory is one file in memory, mapped twice: emulated kernels and copies use the "host view".
// The address that a program gets is of the "device view", which no code may touch when the guard is on: there a
// host access without a copy ends in a message and SIGSEGV. Without the guard both views are the same.
#pragma once

#include <cstddef>
#include <cstdint>

namespace npu {

constexpr size_t kAlignment = 512;

int device_count();

// nullptr if the device has no free range of this length.
void *device_allocate(int device, size_t bytes);
// False if nothing was allocated at this address.
bool device_free(void *address);
void memory_info(int device, size_t *free_bytes, size_t *total_bytes);

// The device to which an address belongs, -1 for host memory.
int device_of(const void *address);
// Where the emulator may read and write what is at a device address; host addresses are returned as they are.
void *host_view(const void *address);
// Number of allocations that were never freed, and their bytes.
size_t live_allocations(size_t *bytes);

// Pinned host memory: allocated here, or registered.
void *pinned_allocate(size_t bytes);
bool pinned_free(void *address);
bool pinned_register(void *address, size_t bytes);
bool pinned_unregister(void *address);
bool is_pinned(const void *address);

// Memory of another process's device. The key names process, device, offset and length.
bool export_range(const void *address, size_t bytes, char *key, size_t key_bytes);
void *import_range(const char *key);
bool close_range(const char *key);

}  // namespace npu
