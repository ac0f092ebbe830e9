#include "ddp/fused_packer.h"

#include <ATen/core/TensorBody.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "c10d/cuda_staging.h"
#include "c10d/dtypes.h"
#include "ddp/grad_streams.h"
#include "device/cuda_library.h"
#include "device/fused_bucket.h"

namespace pycomm {
namespace {

constexpr int64_t kStatsNumel = sizeof(cuda::PackStats) / sizeof(int32_t);

cuda::FusedBucket planOf(const std::vector<at::Tensor>& gradients, const std::vector<size_t>& numels, DType dtype) {
  std::vector<cuda::Gradient> places;
  places.reserve(gradients.size());
  for (size_t i = 0; i < gradients.size(); ++i) {
    places.push_back({gradients[i].defined() ? gradients[i].data_ptr() : nullptr, numels[i]});
  }
  return cuda::planFusedBucket(places.data(), places.size(), dtype);
}

void* currentHandle(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStreamNativeHandle(currentStream(device));
}

std::vector<size_t> numelsOf(const BucketMemory& memory) {
  std::vector<size_t> numels;
  for (const Slot& slot : memory.slots) {
    numels.push_back(slot.numel);
  }
  return numels;
}

at::ScalarType gradientType(const BucketMemory& memory) {
  return BucketKernels::gradientType(memory.dtype(), memory.travelling().scalar_type());
}

} // namespace

// --- kernels --------------------------------------------------------------------------------------

BucketKernels::BucketKernels(const std::string& library_path, c10::Device device)
    : runtime_(&cuda::cudaLibrary(library_path)), device_(device) {
  const c10::DeviceGuard guard(device_);
  runtime_->checkDevice();
}

bool BucketKernels::packsAsItIs(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16;
}

at::ScalarType BucketKernels::gradientType(at::ScalarType grad, at::ScalarType wire) {
  return packsAsItIs(grad) && (wire == grad || wire == at::kFloat) ? grad : at::kFloat;
}

void BucketKernels::pack(
    const std::vector<at::Tensor>& gradients,
    const std::vector<size_t>& numels,
    at::ScalarType dtype,
    const at::Tensor& bucket,
    float factor,
    const at::Tensor& stats) const {
  const DType grad = toDType(dtype);
  const c10::DeviceGuard guard(device_);
  cuda::packBucket(
      *runtime_,
      planOf(gradients, numels, grad),
      grad,
      toDType(bucket.scalar_type()),
      bucket.data_ptr(),
      factor,
      stats.defined() ? static_cast<cuda::PackStats*>(stats.data_ptr()) : nullptr,
      currentHandle(device_));
}

void BucketKernels::unpack(
    const std::vector<at::Tensor>& gradients,
    const std::vector<size_t>& numels,
    at::ScalarType dtype,
    const at::Tensor& bucket,
    float factor) const {
  const DType grad = toDType(dtype);
  const c10::DeviceGuard guard(device_);
  cuda::unpackBucket(
      *runtime_,
      planOf(gradients, numels, grad),
      grad,
      toDType(bucket.scalar_type()),
      bucket.data_ptr(),
      factor,
      currentHandle(device_));
}

at::Tensor BucketKernels::newStats() const {
  return at::zeros({kStatsNumel}, at::TensorOptions().dtype(at::kInt).device(device_));
}

void BucketKernels::writeExponent(const at::Tensor& stats, const at::Tensor& tail, int rank) const {
  cuda::ExponentArgs args;
  args.stats = static_cast<const cuda::PackStats*>(stats.const_data_ptr());
  args.tail = static_cast<uint16_t*>(tail.data_ptr());
  args.numel = static_cast<uint32_t>(tail.numel());
  args.rank = static_cast<uint32_t>(rank);
  const c10::DeviceGuard guard(device_);
  runtime_->writeExponent(args, currentHandle(device_));
}

// --- packer ---------------------------------------------------------------------------------------

void FusedPacker::seal(BucketMemory& memory, double factor, bool streams_differ) {
  const at::ScalarType type = gradientType(memory);
  std::vector<at::Tensor> gradients;
  std::vector<at::Tensor> read; // by this stream, whatever stream they were made on
  for (const Slot& slot : memory.slots) {
    at::Tensor grad = slot.param.grad();
    if (grad.defined() && (grad.scalar_type() != type || !BucketMemory::isPlain(grad, slot))) {
      read.push_back(grad);
      grad = BucketMemory::emptyLike(slot, grad.options().dtype(type)).copy_(grad);
    }
    gradients.push_back(std::move(grad));
  }
  stats_ = measures_ ? kernels_.newStats() : at::Tensor();
  const at::Tensor& flat = memory.cast.defined() ? memory.cast : memory.home;
  kernels_.pack(gradients, numelsOf(memory), type, flat, static_cast<float>(factor), stats_);
  if (streams_differ) {
    read.insert(read.end(), gradients.begin(), gradients.end());
    keepForStream(read, currentStream(memory.device()));
  }
  if (memory.cast.defined() || !memory.gradsAreViews()) {
    return;
  }
  for (const Slot& slot : memory.slots) {
    at::Tensor& grad = slot.param.mutable_grad();
    if (grad.defined()) {
      grad = slot.view;
    }
  }
}

// By a kernel of its own: reading the bits here would wait for the device in the middle of backward, and torch's operators would be
// more than ten launches a bucket.
void FusedPacker::writeMagnitude(const at::Tensor& tail, int rank, double ratio) const {
  if (!stats_.defined()) {
    tail.zero_(); // zeros were packed
    return;
  }
  kernels_.writeExponent(stats_, tail, rank);
  if (const int shift = WireScale::exponentOf(ratio); shift != 0) {
    at::Tensor code = tail.narrow(0, rank, 1);
    const at::Tensor flag = code.ge(WireScale::kNonFinite).to(code.scalar_type()).mul(WireScale::kNonFinite);
    const at::Tensor plain = code.sub(flag);
    const at::Tensor shifted = plain.add(shift).clamp(WireScale::kLowestCode, WireScale::kHighestCode);
    code.copy_(at::where(plain.gt(0), shifted, plain).add(flag));
  }
}

void FusedPacker::unpack(BucketMemory& memory, const std::vector<size_t>& slots, double factor) const {
  const at::ScalarType type = gradientType(memory);
  std::vector<at::Tensor> targets(memory.slots.size());
  std::vector<std::pair<at::Tensor, at::Tensor>> copies; // to, from
  bool any = false;
  for (const size_t index : slots) {
    const Slot& slot = memory.slots[index];
    const at::Tensor& grad = memory.gradientOf(slot);
    if (!memory.cast.defined() && BucketMemory::isHome(grad, slot)) {
      continue; // it has the result
    }
    at::Tensor target = grad;
    if (grad.scalar_type() != type || !BucketMemory::isPlain(grad, slot)) {
      target = BucketMemory::emptyLike(slot, grad.options().dtype(type));
      copies.emplace_back(grad, target);
    } else {
      BucketMemory::bumpVersion(grad);
    }
    targets[index] = target;
    any = true;
  }
  if (!any) {
    return;
  }
  kernels_.unpack(targets, numelsOf(memory), type, memory.travelling(), static_cast<float>(factor));
  for (const auto& [to, from] : copies) {
    to.copy_(from);
  }
}

} // namespace pycomm
