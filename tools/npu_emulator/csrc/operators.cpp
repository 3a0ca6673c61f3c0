// Runs the device's operators by their CPU kernels, over the same memory.
//
// `run_on_cpu` is registered for dispatch key PrivateUse1: arguments become CPU tensors over the host view of their
// memory, the call goes on to the CPU kernel, results become device tensors. The operators of a stream keep their
// order: one that returns new tensors first waits for the stream's queue, since shapes are known only then; one
// that only writes to its arguments is queued when something is queued already, or when tasks are delayed.
// During a capture both are only recorded; shapes of new tensors come from the operator's kernel for "meta" tensors, or
// where there is none, from a run.
#include <Python.h>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include "torch_npu/csrc/core/npu/NPUStream.h"

#include <cstdio>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "arena.h"
#include "stream.h"

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

constexpr c10::DispatchKeySet kCpu(c10::DispatchKey::CPU);

struct WithoutGil {
  PyThreadState *state = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  WithoutGil() = default;
  WithoutGil(const WithoutGil &) = delete;
  WithoutGil &operator=(const WithoutGil &) = delete;
  ~WithoutGil() {
    if (state != nullptr) PyEval_RestoreThread(state);
  }
};

bool on_npu(const Tensor &tensor) { return tensor.defined() && tensor.device().is_privateuseone(); }

// A CPU tensor over the same memory. It doesn't keep the memory: a device's kernel doesn't, either.
Tensor host_tensor(const Tensor &tensor) {
  void *memory = tensor.numel() == 0 ? nullptr : npu::host_view(tensor.data_ptr());
  Tensor view = at::from_blob(memory, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  if (tensor.is_conj()) view._set_conj(true);
  if (tensor.is_neg()) view._set_neg(true);
  return view;
}

// A call's arguments as the CPU kernel sees them, and what they stand for.
class Call {
 public:
  Call(const c10::OperatorHandle &op, const Stack *stack) : op_(op) {
    size_t count = op.schema().arguments().size();
    for (size_t n = stack->size() - count; n < stack->size(); n++) arguments_.push_back(convert((*stack)[n]));
  }

  const std::vector<IValue> &arguments() const { return arguments_; }
  c10::Device device() const { return device_.value_or(c10::Device(c10::kPrivateUse1, c10_npu_device())); }
  bool has_host_tensor() const { return host_tensors_; }

  // The device tensor of a result: an argument, a view of one, or a new tensor. ``fresh`` gets copies of new ones.
  Tensor back(const Tensor &result, std::vector<std::pair<size_t, Tensor>> *fresh, size_t number) const {
    if (!result.defined() || !result.device().is_cpu()) return result;
    auto known = originals_.find(result.unsafeGetTensorImpl());
    if (known != originals_.end()) return returned_argument(known->second, result);
    if (result.numel() > 0)
      for (const auto &item : originals_)
        if (const Tensor &base = item.second; inside(result, base)) return view_of(base, result);
    Tensor made = at::empty_strided(result.sizes(), result.strides(), result.options().device(device()));
    if (result.numel() > 0) host_tensor(made).copy_(result);
    if (result.is_conj()) made._set_conj(true);
    if (result.is_neg()) made._set_neg(true);
    if (fresh != nullptr && result.numel() > 0) fresh->emplace_back(number, host_tensor(made));
    return made;
  }

 private:
  static c10::DeviceIndex c10_npu_device() { return c10_npu::getCurrentNPUStream().device_index(); }

  IValue convert(const IValue &value) {
    if (value.isTensor()) return convert(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor &tensor : value.toTensorVector()) list.push_back(convert(tensor));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> tensor : value.toOptionalTensorList())
        list.push_back(tensor.has_value() && tensor->defined() ? std::optional<Tensor>(convert(*tensor)) : tensor);
      return list;
    }
    if (value.isDevice() && value.toDevice().is_privateuseone()) {
      device_ = value.toDevice();
      return c10::Device(c10::kCPU);
    }
    return value;
  }

  Tensor convert(const Tensor &tensor) {
    if (!on_npu(tensor)) {
      host_tensors_ |= tensor.defined() && !tensor.unsafeGetTensorImpl()->is_wrapped_number();
      return tensor;
    }
    device_ = tensor.device();
    Tensor view = host_tensor(tensor);
    originals_.emplace(view.unsafeGetTensorImpl(), tensor);
    return view;
  }

  // ``out=`` arguments may have been resized on the CPU.
  static Tensor returned_argument(const Tensor &argument, const Tensor &result) {
    bool moved = result.numel() > 0 && result.data_ptr() != npu::host_view(argument.data_ptr());
    if (argument.sizes() != result.sizes() || moved) {
      argument.resize_(result.sizes());
      host_tensor(argument).copy_(result);
    }
    return argument;
  }

  static bool inside(const Tensor &result, const Tensor &base) {
    if (!base.has_storage() || base.storage().nbytes() == 0) return false;
    const char *start = static_cast<const char *>(npu::host_view(base.storage().data()));
    const char *place = static_cast<const char *>(result.data_ptr());
    return place >= start && place < start + base.storage().nbytes();
  }

  static Tensor view_of(const Tensor &base, const Tensor &result) {
    const char *start = static_cast<const char *>(npu::host_view(base.storage().data()));
    int64_t bytes = static_cast<const char *>(result.data_ptr()) - start;
    Tensor typed = base.scalar_type() == result.scalar_type() ? base : base.view(result.scalar_type());
    return at::as_strided(typed, result.sizes(), result.strides(), bytes / static_cast<int64_t>(result.itemsize()));
  }

  c10::OperatorHandle op_;
  std::vector<IValue> arguments_;
  std::unordered_map<c10::TensorImpl *, Tensor> originals_;
  std::optional<c10::Device> device_;
  bool host_tensors_ = false;
};

npu::Stream &current_stream(c10::Device device) {
  return *static_cast<npu::Stream *>(c10_npu::getCurrentNPUStream(device.index()).stream());
}

Stack call_cpu(const c10::OperatorHandle &op, const std::vector<IValue> &arguments) {
  at::AutoDispatchBelowADInplaceOrView below;
  Stack stack(arguments.begin(), arguments.end());
  op.redispatchBoxed(kCpu, &stack);
  return stack;
}

// Whether a call only writes to arguments and returns the first of them, or nothing.
bool in_place(const c10::FunctionSchema &schema) {
  if (schema.returns().empty()) return true;
  if (schema.returns().size() != 1 || schema.arguments().empty()) return false;
  const c10::AliasInfo *argument = schema.arguments()[0].alias_info();
  const c10::AliasInfo *returned = schema.returns()[0].alias_info();
  return argument != nullptr && returned != nullptr && argument->isWrite() && returned->isWrite() &&
         schema.name().back() == '_' && schema.name() != "aten::resize_" && schema.name() != "aten::resize_as_";
}

std::string with_name(const c10::OperatorHandle &op, const std::string &error) {
  return toString(op.operator_name()) + " in a queue: " + error;
}

// A task that calls an operator without new results.
npu::Task write_task(const c10::OperatorHandle &op, const std::vector<IValue> &arguments) {
  return [op, arguments] {
    try {
      call_cpu(op, arguments);
    } catch (const std::exception &error) {
      throw std::runtime_error(with_name(op, error.what()));
    }
  };
}

std::vector<Tensor> tensors_of(const Stack &results) {
  std::vector<Tensor> found;
  for (const IValue &value : results) {
    if (value.isTensor()) found.push_back(value.toTensor());
    if (value.isTensorList())
      for (const Tensor &tensor : value.toTensorVector()) found.push_back(tensor);
  }
  return found;
}

void drain(npu::Stream &stream) {
  WithoutGil released;
  stream.synchronize();
}

void raise_errors(npu::Stream &stream) {
  std::string error = stream.take_error();
  TORCH_CHECK(error.empty(), "npu_emulator: ", error);
}

void return_results(const Call &call, Stack results, Stack *stack, std::vector<std::pair<size_t, Tensor>> *fresh) {
  size_t number = 0;
  for (IValue &value : results) {
    if (value.isTensor()) {
      value = call.back(value.toTensor(), fresh, number++);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor &tensor : value.toTensorVector()) list.push_back(call.back(tensor, fresh, number++));
      value = list;
    }
    stack->push_back(std::move(value));
  }
}

void record_call(const c10::OperatorHandle &op, const Call &call, npu::Stream &stream,
                 std::vector<std::pair<size_t, Tensor>> fresh) {
  auto arguments = call.arguments();
  stream.submit([op, arguments, fresh] {
    try {
      std::vector<Tensor> results = tensors_of(call_cpu(op, arguments));
      at::AutoDispatchBelowADInplaceOrView below;
      for (const auto &item : fresh) {
        const Tensor &result = results.at(item.first);
        if (result.numel() > 0) Tensor(item.second).copy_(result);  // else an output that this call leaves out
      }
    } catch (const std::exception &error) {
      throw std::runtime_error(with_name(op, error.what()));
    }
  });
}

// Calls an operator on tensors without data.
class Shapes {
 public:
  // False if the operator has no kernel for it, or asks for values.
  bool of(const c10::OperatorHandle &op, const Stack *stack, size_t begin) {
    if (!op.hasKernelForDispatchKey(c10::DispatchKey::Meta)) return false;
    try {
      for (size_t n = begin; n < stack->size(); n++) results_.push_back(convert((*stack)[n]));
      at::AutoDispatchBelowADInplaceOrView below;
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &results_);
      return true;
    } catch (const std::exception &) {
      return false;
    }
  }

  // Pushes device tensors of those shapes. ``fresh`` gets those that a call must fill.
  void push(Stack *stack, c10::Device device, std::vector<std::pair<size_t, Tensor>> &fresh) {
    size_t number = 0;
    for (IValue &value : results_) {
      if (value.isTensor()) {
        value = real(value.toTensor(), device, fresh, number++);
      } else if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor &tensor : value.toTensorVector()) list.push_back(real(tensor, device, fresh, number++));
        value = list;
      }
      stack->push_back(std::move(value));
    }
  }

 private:
  IValue convert(const IValue &value) {
    if (value.isTensor()) return convert(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor &tensor : value.toTensorVector()) list.push_back(convert(tensor));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> tensor : value.toOptionalTensorList())
        list.push_back(tensor.has_value() && tensor->defined() ? std::optional<Tensor>(convert(*tensor)) : tensor);
      return list;
    }
    if (value.isDevice()) return c10::Device(c10::kMeta);
    return value;
  }

  Tensor convert(const Tensor &tensor) {
    if (!tensor.defined() || (!on_npu(tensor) && tensor.dim() == 0)) return tensor;
    Tensor made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
    given_.emplace_back(made, tensor);
    return made;
  }

  Tensor real(const Tensor &result, c10::Device device, std::vector<std::pair<size_t, Tensor>> &fresh, size_t number) {
    if (!result.defined()) return result;
    for (const auto &[made, original] : given_) {
      if (result.unsafeGetTensorImpl() == made.unsafeGetTensorImpl()) return original;
      if (result.is_alias_of(made))
        return at::as_strided(original, result.sizes(), result.strides(),
                              original.storage_offset() + result.storage_offset());
    }
    Tensor tensor = at::empty_strided(result.sizes(), result.strides(), result.options().device(device));
    if (result.numel() > 0) fresh.emplace_back(number, host_tensor(tensor));
    return tensor;
  }

  Stack results_;
  std::vector<std::pair<Tensor, Tensor>> given_;
};

void run_on_cpu(const c10::OperatorHandle &op, Stack *stack) {
  Call call(op, stack);
  npu::Stream &stream = current_stream(call.device());
  const auto &schema = op.schema();
  size_t begin = stack->size() - schema.arguments().size();
  bool recording = stream.capturing != nullptr || stream.updating != nullptr;
  bool queue = recording || npu::longest_delay() > 0 || !stream.idle();
  if (in_place(schema) && queue && (recording || !call.has_host_tensor())) {
    IValue first = schema.returns().empty() ? IValue() : (*stack)[begin];
    stack->erase(stack->begin() + static_cast<std::ptrdiff_t>(begin), stack->end());
    stream.submit(write_task(op, call.arguments()));
    if (!schema.returns().empty()) stack->push_back(first);
    return;
  }
  if (recording && schema.overload_name() == "out" && stack->back().isTensorList()) {
    std::vector<Tensor> targets = stack->back().toTensorVector();  // torch_npu's own: it returns what it is given
    stack->erase(stack->begin() + static_cast<std::ptrdiff_t>(begin), stack->end());
    stream.submit(write_task(op, call.arguments()));
    for (size_t n = 0; n < schema.returns().size(); n++) stack->push_back(targets.at(n));
    return;
  }
  if (!recording) {
    drain(stream);
    raise_errors(stream);
  }
  if (Shapes shapes; stream.capturing != nullptr && shapes.of(op, stack, begin)) {
    stack->erase(stack->begin() + static_cast<std::ptrdiff_t>(begin), stack->end());
    std::vector<std::pair<size_t, Tensor>> unfilled;
    at::AutoDispatchBelowADInplaceOrView below;
    shapes.push(stack, call.device(), unfilled);
    record_call(op, call, stream, std::move(unfilled));
    return;
  }
  Stack results = call_cpu(op, call.arguments());
  stack->erase(stack->begin() + static_cast<std::ptrdiff_t>(begin), stack->end());
  std::vector<std::pair<size_t, Tensor>> fresh;
  at::AutoDispatchBelowADInplaceOrView below;
  return_results(call, std::move(results), stack, recording ? &fresh : nullptr);
  if (recording) record_call(op, call, stream, std::move(fresh));
}

// copy_ is the one operator with tensors of both sides: from pinned memory and to pinned memory it may be queued.
void copy_boxed(const c10::OperatorHandle &op, Stack *stack) {
  size_t begin = stack->size() - 3;
  Tensor target = (*stack)[begin].toTensor(), source = (*stack)[begin + 1].toTensor();
  bool asynchronous = (*stack)[begin + 2].toBool();
  Call call(op, stack);
  npu::Stream &stream = current_stream(call.device());
  stack->erase(stack->begin() + static_cast<std::ptrdiff_t>(begin), stack->end());
  auto arguments = call.arguments();
  bool both = on_npu(target) && on_npu(source);
  const Tensor &host = on_npu(target) ? source : target;
  bool pinned = both || host.numel() == 0 || npu::is_pinned(host.data_ptr());
  bool recording = stream.capturing != nullptr || stream.updating != nullptr;
  // torch_npu's host allocator keeps pinned memory from reuse until the stream has passed a copy. It doesn't keep what a
  // captured graph reads.
  c10::Storage kept = both || !host.has_storage() || recording ? c10::Storage() : host.storage();
  if (!both) {
    Tensor view = at::from_blob(host.data_ptr(), host.sizes(), host.strides(), host.options());
    arguments[on_npu(target) ? 1 : 0] = pinned ? view : on_npu(target) && asynchronous ? host.clone() : host;
  }
  bool may_return = both || (asynchronous && (pinned || on_npu(target)));
  TORCH_CHECK(may_return || !recording, "npu_emulator: the host can't wait for a copy while a stream is captured");
  if (may_return && !recording && npu::longest_delay() == 0 && stream.idle()) {
    call_cpu(op, arguments);
  } else {
    stream.submit([copy = write_task(op, arguments), kept] { copy(); });
    if (!may_return) {
      drain(stream);
      raise_errors(stream);
    }
  }
  stack->push_back(target);
}

void unknown(const c10::OperatorHandle &op, Stack *) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "npu_emulator has no ", toString(op.operator_name()),
                              ": add a CPU implementation in tools/npu_emulator/npu_emulator/ops");
}

using Boxed = torch::CppFunction;

int install(const char *ns, const char *const *names, int count, Boxed (*make)()) {
  static std::vector<std::unique_ptr<torch::Library>> kept;
  auto library = std::make_unique<torch::Library>(torch::Library::IMPL, ns,
                                                  std::make_optional(c10::DispatchKey::PrivateUse1), __FILE__, __LINE__);
  int done = 0;
  for (int n = 0; n < count; n++) {
    try {
      library->impl(names[n], make());
      done++;
    } catch (const std::exception &error) {
      std::fprintf(stderr, "npu_emulator: %s::%s: %s\n", ns, names[n], error.what());
    }
  }
  kept.push_back(std::move(library));
  return done;
}

}  // namespace

extern "C" {

int npu_emulator_run_on_cpu(const char *ns, const char *const *names, int count) {
  return install(ns, names, count, [] { return Boxed::makeFromBoxedFunction<&run_on_cpu>(); });
}

int npu_emulator_copy(const char *ns, const char *const *names, int count) {
  return install(ns, names, count, [] { return Boxed::makeFromBoxedFunction<&copy_boxed>(); });
}

int npu_emulator_unknown(const char *ns, const char *const *names, int count) {
  return install(ns, names, count, [] { return Boxed::makeFromBoxedFunction<&unknown>(); });
}

}  // extern "C"
