// The ACL runtime API (libascendcl.so) over arenas and streams in host memory: what torch_npu calls.
//
// Declarations are those of CANN's headers, as torch_npu ships them. A function that isn't here is a generated
// stand-in (build.py), which returns "feature unsupported" and says so with NPU_EMULATOR_TRACE=1.
#include <acl/acl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "arena.h"
#include "stream.h"

namespace {

constexpr aclError kOutOfMemory = 207001, kInvalid = 107000, kTaskFailed = 507015, kCaptured = 107025;

thread_local int current_device = 0;
thread_local std::string last_message;
int context_of_device[64];

npu::Stream &default_stream() {
  static npu::Stream *streams[64];
  static std::mutex lock;
  std::lock_guard<std::mutex> hold(lock);
  npu::Stream *&stream = streams[current_device];
  if (stream == nullptr) stream = new npu::Stream(current_device);
  return *stream;
}

npu::Stream &of(aclrtStream stream) {
  return stream != nullptr ? *static_cast<npu::Stream *>(stream) : default_stream();
}

npu::Event &of_event(aclrtEvent event) { return *static_cast<npu::Event *>(event); }

aclError fail(aclError code, const std::string &message) {
  last_message = message;
  return code;
}

aclError outcome(const std::string &error) { return error.empty() ? ACL_SUCCESS : fail(kTaskFailed, error); }

aclError synchronize(npu::Stream &stream) {
  if (stream.capturing != nullptr) return fail(kCaptured, "a stream can't be waited for while it is captured");
  stream.synchronize();
  return outcome(stream.take_error());
}

void copy(void *target, const void *source, size_t bytes) {
  std::memmove(npu::host_view(target), npu::host_view(source), bytes);
}

void report_leaks() {
  npu::synchronize_device(-1);
  size_t bytes = 0, count = npu::live_allocations(&bytes);
  if (count > 0)
    std::fprintf(stderr, "npu_emulator: %zu allocations of device memory are alive at exit, %zu bytes\n", count, bytes);
}

struct Model {
  std::shared_ptr<npu::Graph> graph;
};

}  // namespace

extern "C" {

// --- process and devices

aclError aclInit(const char *) {
  if (std::getenv("NPU_EMULATOR_LEAKS") != nullptr) std::atexit(report_leaks);
  return ACL_SUCCESS;
}
aclError aclFinalize() { return ACL_SUCCESS; }
const char *aclGetRecentErrMsg() { return last_message.c_str(); }
const char *aclrtGetSocName() {
  const char *name = std::getenv("NPU_EMULATOR_SOC");
  return name != nullptr ? name : "Ascend910B1";
}
aclError aclrtGetDeviceCount(uint32_t *count) {
  *count = static_cast<uint32_t>(npu::device_count());
  return ACL_SUCCESS;
}
aclError aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= npu::device_count()) return fail(kInvalid, "no such device");
  current_device = device;
  return ACL_SUCCESS;
}
aclError aclrtGetDevice(int32_t *device) {
  *device = current_device;
  return ACL_SUCCESS;
}
aclError aclrtResetDevice(int32_t device) { return outcome(npu::synchronize_device(device)); }
aclError aclrtSynchronizeDevice() { return outcome(npu::synchronize_device(current_device)); }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }
aclError aclrtGetCurrentContext(aclrtContext *context) {
  *context = &context_of_device[current_device];
  return ACL_SUCCESS;
}
aclError aclrtSetCurrentContext(aclrtContext context) {
  current_device = static_cast<int>(static_cast<int *>(context) - context_of_device);
  return ACL_SUCCESS;
}
aclError aclrtGetPrimaryCtxState(int32_t, uint32_t *flags, int32_t *active) {
  if (flags != nullptr) *flags = 0;
  *active = 1;
  return ACL_SUCCESS;
}
aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr, int64_t *value) {
  *value = 48;  // cores, of any kind
  return ACL_SUCCESS;
}
aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo, int64_t *value) {
  *value = 0;
  return ACL_SUCCESS;
}
aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t, int32_t) {
  *can = 0;
  return ACL_SUCCESS;
}
aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t *const logic) {
  *logic = user;
  return ACL_SUCCESS;
}
aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
aclError aclrtGetLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return ACL_SUCCESS; }

// --- memory

aclError aclrtMalloc(void **address, size_t bytes, aclrtMemMallocPolicy) {
  *address = npu::device_allocate(current_device, bytes);
  return *address != nullptr ? ACL_SUCCESS : fail(kOutOfMemory, "the emulated device has no such free range");
}
aclError aclrtMallocAlign32(void **address, size_t bytes, aclrtMemMallocPolicy policy) {
  return aclrtMalloc(address, bytes, policy);
}
aclError aclrtFree(void *address) {
  int device = npu::device_of(address);
  if (device >= 0) npu::synchronize_device(device);  // as a real free does
  return npu::device_free(address) ? ACL_SUCCESS : fail(kInvalid, "not an allocation of device memory");
}
aclError aclrtGetMemInfo(aclrtMemAttr, size_t *free_bytes, size_t *total_bytes) {
  npu::memory_info(current_device, free_bytes, total_bytes);
  return ACL_SUCCESS;
}
aclError aclrtMallocHost(void **address, size_t bytes) {
  *address = npu::pinned_allocate(bytes);
  return *address != nullptr ? ACL_SUCCESS : kOutOfMemory;
}
aclError aclrtMallocHostWithCfg(void **address, uint64_t bytes, aclrtMallocConfig *) {
  return aclrtMallocHost(address, bytes);
}
aclError aclrtFreeHost(void *address) {
  return npu::pinned_free(address) ? ACL_SUCCESS : fail(kInvalid, "not an allocation of pinned memory");
}
aclError aclrtHostRegister(void *address, uint64_t bytes, aclrtHostRegisterType, void **device_address) {
  *device_address = address;
  return npu::pinned_register(address, bytes) ? ACL_SUCCESS : fail(kInvalid, "registered twice");
}
aclError aclrtHostRegisterV2(void *address, uint64_t bytes, uint32_t) {
  return npu::pinned_register(address, bytes) ? ACL_SUCCESS : fail(kInvalid, "registered twice");
}
aclError aclrtHostGetDevicePointer(void *address, void **device_address, uint32_t) {
  *device_address = address;
  return npu::is_pinned(address) ? ACL_SUCCESS : fail(kInvalid, "not registered");
}
aclError aclrtHostUnregister(void *address) {
  return npu::pinned_unregister(address) ? ACL_SUCCESS : fail(kInvalid, "not registered");
}
aclError aclrtPointerGetAttributes(const void *address, aclrtPtrAttributes *attributes) {
  int device = npu::device_of(address);
  *attributes = {};
  attributes->location.id = device < 0 ? 0 : static_cast<uint32_t>(device);
  attributes->location.type = device >= 0                ? ACL_MEM_LOCATION_TYPE_DEVICE
                              : npu::is_pinned(address) ? ACL_MEM_LOCATION_TYPE_HOST
                                                        : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  return ACL_SUCCESS;
}
aclError aclrtMemcpy(void *target, size_t room, const void *source, size_t bytes, aclrtMemcpyKind) {
  if (bytes > room) return fail(kInvalid, "more bytes than the target has room for");
  copy(target, source, bytes);
  return ACL_SUCCESS;
}
aclError aclrtMemcpyAsync(void *target, size_t room, const void *source, size_t bytes, aclrtMemcpyKind,
                          aclrtStream stream) {
  if (bytes > room) return fail(kInvalid, "more bytes than the target has room for");
  of(stream).submit([=] { copy(target, source, bytes); });
  return ACL_SUCCESS;
}
aclError aclrtMemcpyAsyncWithCondition(void *target, size_t room, const void *source, size_t bytes,
                                       aclrtMemcpyKind kind, aclrtStream stream) {
  return aclrtMemcpyAsync(target, room, source, bytes, kind, stream);
}
aclError aclrtMemset(void *target, size_t room, int32_t value, size_t bytes) {
  if (bytes > room) return fail(kInvalid, "more bytes than the target has room for");
  std::memset(npu::host_view(target), value, bytes);
  return ACL_SUCCESS;
}
aclError aclrtMemsetAsync(void *target, size_t room, int32_t value, size_t bytes, aclrtStream stream) {
  if (bytes > room) return fail(kInvalid, "more bytes than the target has room for");
  of(stream).submit([=] { std::memset(npu::host_view(target), value, bytes); });
  return ACL_SUCCESS;
}
aclError aclrtIpcMemGetExportKey(void *address, size_t bytes, char *key, size_t length, uint64_t) {
  return npu::export_range(address, bytes, key, length) ? ACL_SUCCESS : fail(kInvalid, "not device memory");
}
aclError aclrtIpcMemImportByKey(void **address, const char *key, uint64_t) {
  *address = npu::import_range(key);
  return *address != nullptr ? ACL_SUCCESS : fail(kInvalid, "the key names no memory, or was imported before");
}
aclError aclrtIpcMemClose(const char *key) {
  npu::close_range(key);  // the exporting side has nothing to close
  return ACL_SUCCESS;
}
aclError aclrtIpcMemSetImportPid(const char *, int32_t *, size_t) { return ACL_SUCCESS; }
aclError aclrtDeviceGetBareTgid(int32_t *process) {
  *process = getpid();
  return ACL_SUCCESS;
}

// --- streams

aclError aclrtCreateStream(aclrtStream *stream) {
  *stream = new npu::Stream(current_device);
  return ACL_SUCCESS;
}
aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t, uint32_t) { return aclrtCreateStream(stream); }
aclError aclrtDestroyStream(aclrtStream stream) {
  delete static_cast<npu::Stream *>(stream);
  return ACL_SUCCESS;
}
aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }
aclError aclrtSynchronizeStream(aclrtStream stream) { return synchronize(of(stream)); }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) { return synchronize(of(stream)); }
aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status) {
  *status = of(stream).idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return ACL_SUCCESS;
}
aclError aclrtStreamGetId(aclrtStream stream, int32_t *id) {
  *id = of(stream).id;
  return ACL_SUCCESS;
}
aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }
aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue *) { return ACL_SUCCESS; }
aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void *argument) {
  of(stream).submit([=] { function(argument); });
  return ACL_SUCCESS;
}
// Callbacks run on the stream's own thread; a thread that a program subscribes for them has nothing to do.
aclError aclrtLaunchCallback(aclrtCallback function, void *argument, aclrtCallbackBlockType, aclrtStream stream) {
  of(stream).submit([=] { function(argument); });
  return ACL_SUCCESS;
}
aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtProcessReport(int32_t milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds > 0 ? milliseconds : 1));
  return ACL_SUCCESS;
}

// --- events

aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flags) {
  npu::Event *made = new npu::Event;
  made->external = (flags & ACL_EVENT_EXTERNAL) != 0;
  *event = made;
  return ACL_SUCCESS;
}
aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flags) { return aclrtCreateEventExWithFlag(event, flags); }
aclError aclrtCreateEvent(aclrtEvent *event) { return aclrtCreateEventExWithFlag(event, 0); }
aclError aclrtDestroyEvent(aclrtEvent event) {
  delete static_cast<npu::Event *>(event);
  return ACL_SUCCESS;
}
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
  npu::record(of_event(event), of(stream));
  return ACL_SUCCESS;
}
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
  npu::wait_for(of_event(event), of(stream));
  return ACL_SUCCESS;
}
aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream) {
  if (of_event(event).external) {
    auto state = of_event(event).state;
    of(stream).submit([state] { state->reset(); });
  }
  return ACL_SUCCESS;
}
aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status) {
  const auto &state = *of_event(event).state;
  bool done = state.completed(state.last_record());
  *status = done ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return ACL_SUCCESS;
}
aclError aclrtQueryEvent(aclrtEvent event, aclrtEventStatus *status) {
  const auto &state = *of_event(event).state;
  *status = state.completed(state.last_record()) ? ACL_EVENT_STATUS_COMPLETE : ACL_EVENT_STATUS_NOT_READY;
  return ACL_SUCCESS;
}
aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status) {
  const auto &state = *of_event(event).state;
  *status = state.completed(state.last_record()) ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
  return ACL_SUCCESS;
}
aclError aclrtSynchronizeEvent(aclrtEvent event) {
  const auto &state = *of_event(event).state;
  state.wait(state.last_record());
  return ACL_SUCCESS;
}
aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent start, aclrtEvent end) {
  *milliseconds = static_cast<float>(of_event(end).state->milliseconds() - of_event(start).state->milliseconds());
  return ACL_SUCCESS;
}
aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t *microseconds) {
  *microseconds = static_cast<uint64_t>(of_event(event).state->milliseconds() * 1000);
  return ACL_SUCCESS;
}

// --- captured graphs

aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode) {
  if (of(stream).capturing != nullptr) return fail(kCaptured, "the stream is being captured");
  auto graph = std::make_shared<npu::Graph>();
  graph->model = new Model{graph};
  of(stream).capturing = graph;
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus *status, aclmdlRI *model) {
  bool active = of(stream).capturing != nullptr;
  *status = active ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
  if (model != nullptr) *model = active ? of(stream).capturing->model : nullptr;
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI *model) {
  std::shared_ptr<npu::Graph> graph = of(stream).capturing;
  if (graph == nullptr) return fail(kCaptured, "the stream isn't captured");
  npu::end_capture(graph);
  *model = graph->model;
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *mode) {
  thread_local aclmdlRICaptureMode current = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
  std::swap(current, *mode);
  return ACL_SUCCESS;
}
aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream stream) {
  std::shared_ptr<npu::Graph> graph = static_cast<Model *>(model)->graph;
  of(stream).submit([graph] {
    for (size_t n = 0;; n++) {
      npu::Task task;
      {
        std::lock_guard<std::mutex> hold(graph->lock);
        if (n >= graph->tasks.size()) return;
        task = graph->tasks[n];  // looked up only now: an update may replace it until the graph gets there
      }
      task();
    }
  });
  return ACL_SUCCESS;
}
aclError aclmdlRIDestroy(aclmdlRI model) {
  delete static_cast<Model *>(model);
  return ACL_SUCCESS;
}
aclError aclmdlRIDebugPrint(aclmdlRI) { return ACL_SUCCESS; }
aclError aclmdlRICaptureTaskGrpBegin(aclrtStream stream) {
  npu::Stream &captured = of(stream);
  if (captured.capturing == nullptr) return fail(kCaptured, "the stream isn't captured");
  captured.group_start = captured.capturing->tasks.size();
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureTaskGrpEnd(aclrtStream stream, aclrtTaskGrp *handle) {
  npu::Stream &captured = of(stream);
  if (captured.capturing == nullptr) return fail(kCaptured, "the stream isn't captured");
  auto *group = new std::shared_ptr<npu::TaskGroup>(std::make_shared<npu::TaskGroup>());
  (*group)->graph = captured.capturing;
  (*group)->first = captured.group_start;
  (*group)->last = captured.capturing->tasks.size();
  *handle = group;
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream stream, aclrtTaskGrp handle) {
  auto &group = *static_cast<std::shared_ptr<npu::TaskGroup> *>(handle);
  group->update.clear();
  of(stream).updating = group;
  return ACL_SUCCESS;
}
aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream stream) {
  std::shared_ptr<npu::TaskGroup> group = of(stream).updating;
  of(stream).updating = nullptr;
  if (group == nullptr) return fail(kInvalid, "no update has begun on the stream");
  if (group->update.size() != group->last - group->first)
    return fail(kInvalid, "an update with another number of tasks than were captured");
  auto update = std::make_shared<std::vector<npu::Task>>(std::move(group->update));
  of(stream).submit([group, update] {  // in the order of the stream, like every other task
    std::lock_guard<std::mutex> hold(group->graph->lock);
    for (size_t n = 0; n < update->size(); n++) group->graph->tasks[group->first + n] = (*update)[n];
  });
  return ACL_SUCCESS;
}

}  // extern "C"
