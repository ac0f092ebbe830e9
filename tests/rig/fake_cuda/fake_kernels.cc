// torch's own operators on the fake device. Each waits for the current stream, then runs torch's CPU kernel on the memory as kernels
// find it. Seen from that stream, it is like a kernel of the stream.
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

#include <cstring>
#include <optional>
#include <vector>

#include "fake_cudart/device.h"
#include "fake_cudart/memory.h"

/// Of fake_cuda.cc.
cudaStream_t fakeCurrentStream(c10::Device on);
void finishFakeStream(c10::Device on);
c10::Device fakeCurrentDevice();

namespace {

using c10::IValue;

/// The same memory as a CPU tensor, where kernels find it.
at::Tensor onHost(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) {
    return tensor;
  }
  int64_t elements = tensor.numel() == 0 ? 0 : 1;
  for (int64_t i = 0; elements != 0 && i < tensor.dim(); ++i) {
    elements += (tensor.size(i) - 1) * tensor.stride(i);
  }
  const size_t nbytes = static_cast<size_t>(elements) * tensor.element_size();
  char* const bytes = fake_cuda::kernelBytes(tensor.data_ptr(), nbytes);
  TORCH_CHECK(bytes != nullptr, "a kernel of torch's: ", tensor.data_ptr(), " is not memory of the fake device");
  return at::for_blob(bytes, tensor.sizes())
      .strides(tensor.strides())
      .options(tensor.options().device(at::kCPU))
      .make_tensor();
}

/// What a kernel has made, as a tensor of the device: the same bytes if they are the device's, else a copy in memory of its own.
/// `given` is what the kernel got: the bytes may be of one of these.
at::Tensor onDevice(const at::Tensor& made, c10::Device device, const std::vector<IValue>& given) {
  if (!made.defined() || !made.is_cpu()) {
    return made;
  }
  void* ptr = nullptr;
  std::function<void(void*)> deleter;
  if (fake_cuda::Memory::the().isInKernel(made.data_ptr())) {
    ptr = fake_cuda::Memory::the().fromKernel(made.data_ptr());
    deleter = [given](void*) {};
  } else {
    const c10::DeviceGuard guard(device);
    const size_t nbytes = made.storage().nbytes();
    void* const begin = fake_cuda::allocate(nbytes, fakeCurrentStream(device));
    if (nbytes != 0) {
      std::memcpy(fake_cuda::kernelBytes(begin, nbytes), made.storage().data(), nbytes);
    }
    ptr = static_cast<char*>(begin) + made.storage_offset() * static_cast<int64_t>(made.element_size());
    deleter = [begin](void*) { fake_cuda::giveBack(begin); };
  }
  return at::for_blob(ptr, made.sizes())
      .strides(made.strides())
      .deleter(std::move(deleter))
      .options(made.options().device(device))
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
  impl->set_storage_keep_dtype(onDevice(made.contiguous(), device, {}).storage());
  impl->set_storage_offset(0);
  impl->set_sizes_and_strides(made.sizes(), made.contiguous().strides());
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
      value = onDevice(value.toTensor(), on, given);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& each : value.toTensorVector()) {
        list.push_back(onDevice(each, on, given));
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
