// torch's own operators on the fake device. Each waits for the current stream, then runs torch's CPU kernel on the same memory: as a
// kernel that the stream comes to, to whoever looks at it from the stream.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <optional>
#include <vector>

/// Of fake_cuda.cc.
void finishFakeStream(c10::Device on);
c10::Device fakeCurrentDevice();

namespace {

using c10::IValue;

/// The same memory as a CPU tensor.
at::Tensor onHost(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) {
    return tensor;
  }
  return at::for_blob(tensor.data_ptr(), tensor.sizes())
      .strides(tensor.strides())
      .options(tensor.options().device(at::kCPU))
      .make_tensor();
}

at::Tensor onDevice(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined() || !tensor.is_cpu()) {
    return tensor;
  }
  return at::for_blob(tensor.data_ptr(), tensor.sizes())
      .strides(tensor.strides())
      .deleter([keep = new at::Tensor(tensor)](void*) {}) // for ever: what is on a stream may still write it
      .options(tensor.options().device(device))
      .target_device(device)
      .make_tensor();
}

/// An argument for the CPU's kernel; takes note of the device that it speaks of.
IValue hosted(const IValue& given, std::optional<c10::Device>& device) {
  const auto note = [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.is_cuda()) {
      device = tensor.device();
    }
    return onHost(tensor);
  };
  if (given.isTensor()) {
    return note(given.toTensor());
  }
  if (given.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : given.toTensorVector()) {
      list.push_back(note(each));
    }
    return list;
  }
  if (given.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& each : given.toOptionalTensorVector()) {
      list.push_back(each ? std::optional<at::Tensor>(note(*each)) : std::nullopt);
    }
    return list;
  }
  if (given.isDevice() && given.toDevice().is_cuda()) {
    device = given.toDevice();
    return c10::Device(at::kCPU);
  }
  return given;
}

/// What a kernel has put into a tensor of its own becomes `output`'s: in its memory where it fits, as its memory otherwise.
void adopt(const at::Tensor& output, const at::Tensor& made, c10::Device device) {
  if (output.sizes() == made.sizes()) {
    onHost(output).copy_(made);
    return;
  }
  at::TensorImpl* const impl = output.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(onDevice(made, device).storage());
  impl->set_storage_offset(0);
  impl->set_sizes_and_strides(made.sizes(), made.strides());
}

void onCpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const size_t begin = stack->size() - count;
  const std::vector<IValue> given(stack->begin() + static_cast<std::ptrdiff_t>(begin), stack->end());
  std::vector<IValue> on_host;
  std::optional<c10::Device> device;
  for (size_t i = 0; i < count; ++i) {
    on_host.push_back(hosted(given[i], device));
    const auto* const alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite() && schema.arguments()[i].is_out() && on_host[i].isTensor()) {
      on_host[i] = at::empty({0}, on_host[i].toTensor().options()); // which the kernel makes as large as it wants
    }
    (*stack)[begin + i] = on_host[i];
  }
  const c10::Device on = device && device->has_index() ? *device : fakeCurrentDevice();
  finishFakeStream(on);
  op.callBoxed(stack);
  for (size_t i = 0; i < count; ++i) {
    const auto* const alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite() && schema.arguments()[i].is_out() && on_host[i].isTensor()) {
      adopt(given[i].toTensor(), on_host[i].toTensor(), on);
    }
  }
  const size_t first = stack->size() - schema.returns().size();
  for (size_t r = 0; r < schema.returns().size(); ++r) {
    IValue& value = (*stack)[first + r];
    const auto* const alias = schema.returns()[r].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      for (size_t i = 0; i < count; ++i) {
        const auto* const argument = schema.arguments()[i].alias_info();
        if (argument != nullptr && argument->isWrite() && argument->afterSets() == alias->afterSets()) {
          value = given[i];
        }
      }
    } else if (value.isTensor()) {
      value = onDevice(value.toTensor(), on);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& each : value.toTensorVector()) {
        list.push_back(onDevice(each, on));
      }
      value = list;
    }
  }
}

at::Tensor& copyInto(at::Tensor& to, const at::Tensor& from, bool) {
  finishFakeStream(to.is_cuda() ? to.device() : from.device());
  onHost(to).copy_(onHost(from));
  return to;
}

/// What autograd's engine asks for. torch looks for a class of this name, once a process: the library is to be loaded before.
struct CUDAHooks final : public at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 2;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return fakeCurrentDevice().index();
  }
};

} // namespace

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks)
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&onCpu>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("copy_", copyInto);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
}
