#include "ddp/device_bucket.h"

#include <ATen/core/TensorBody.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstddef>

#include "c10d/cuda_library.h"
#include "c10d/cuda_staging.h"
#include "c10d/dtypes.h"

namespace pycomm {
namespace {

constexpr int64_t kStatsNumel = sizeof(PycommCudaPackStats) / sizeof(int32_t);
static_assert(offsetof(PycommCudaPackStats, max_abs_bits) == DeviceBucket::kLargest * sizeof(int32_t));

std::vector<PycommCudaGradient> placesOf(const std::vector<at::Tensor>& gradients, const std::vector<size_t>& numels) {
  std::vector<PycommCudaGradient> places;
  places.reserve(gradients.size());
  for (size_t i = 0; i < gradients.size(); ++i) {
    places.push_back({gradients[i].defined() ? gradients[i].data_ptr() : nullptr, numels[i]});
  }
  return places;
}

uint8_t number(at::ScalarType type) {
  return static_cast<uint8_t>(toDType(type));
}

} // namespace

DeviceBucket::DeviceBucket(const std::string& library_path, c10::Device device)
    : library_(&cudaLibrary(library_path)), device_(device) {
  const c10::DeviceGuard guard(device_);
  callCuda(library_->check_device);
}

bool DeviceBucket::packsAsItIs(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16;
}

at::ScalarType DeviceBucket::kernelType(at::ScalarType grad, at::ScalarType wire) {
  return packsAsItIs(grad) && (wire == grad || wire == at::kFloat) ? grad : at::kFloat;
}

c10::Stream DeviceBucket::currentStream() const {
  return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
}

void DeviceBucket::note() {
  const c10::Stream stream = currentStream();
  if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) {
    streams_.push_back(stream);
  }
}

void DeviceBucket::join() {
  const c10::Stream here = currentStream();
  several_ = streams_.size() > 1 || (streams_.size() == 1 && streams_.front() != here);
  for (const c10::Stream& stream : streams_) {
    if (stream != here) {
      c10::Event event(device_.type());
      event.record(stream);
      event.block(here);
    }
  }
  streams_.clear();
}

void DeviceBucket::pack(
    const std::vector<at::Tensor>& gradients,
    const std::vector<size_t>& numels,
    at::ScalarType dtype,
    const at::Tensor& bucket,
    float factor,
    const at::Tensor& stats) const {
  const auto places = placesOf(gradients, numels);
  const c10::DeviceGuard guard(device_);
  callCuda(
      library_->pack,
      places.data(),
      places.size(),
      number(dtype),
      number(bucket.scalar_type()),
      bucket.data_ptr(),
      factor,
      stats.defined() ? static_cast<PycommCudaPackStats*>(stats.data_ptr()) : nullptr,
      c10::impl::VirtualGuardImpl(device_.type()).getStreamNativeHandle(currentStream()));
}

void DeviceBucket::unpack(
    const std::vector<at::Tensor>& gradients,
    const std::vector<size_t>& numels,
    at::ScalarType dtype,
    const at::Tensor& bucket,
    float factor) const {
  const auto places = placesOf(gradients, numels);
  const c10::DeviceGuard guard(device_);
  callCuda(
      library_->unpack,
      places.data(),
      places.size(),
      number(dtype),
      number(bucket.scalar_type()),
      static_cast<const void*>(bucket.data_ptr()),
      factor,
      c10::impl::VirtualGuardImpl(device_.type()).getStreamNativeHandle(currentStream()));
}

void DeviceBucket::keep(const std::vector<at::Tensor>& gradients) const {
  if (several_) {
    keepForStream(gradients, currentStream());
  }
}

at::Tensor DeviceBucket::newStats() const {
  return at::zeros({kStatsNumel}, at::TensorOptions().dtype(at::kInt).device(device_));
}

} // namespace pycomm
