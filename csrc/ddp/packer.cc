#include "ddp/packer.h"

#include <ATen/core/TensorBody.h>
#include <ATen/ops/_coalesced.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "c10d/cuda_staging.h"
#include "c10d/dtypes.h"
#include "ddp/wire.h"
#include "device/cuda_library.h"
#include "device/fused_bucket.h"
#include "numeric/convert.h"

namespace pycomm {
namespace {

// --- home -----------------------------------------------------------------------------------------

void packByTorch(const at::Tensor& out, const at::Tensor& grad, double factor) {
  if (!grad.defined()) {
    out.zero_();
  } else if (factor != 1.0 && grad.scalar_type() == out.scalar_type()) {
    at::Tensor target = out;
    at::mul_out(target, grad, at::scalar_tensor(factor, at::kDouble)); // no dimensions: does not promote
  } else {
    out.copy_(grad);
    if (factor != 1.0) {
      out.mul_(factor);
    }
  }
}

bool isPowerOfTwo(double factor) {
  int exponent = 0;
  return std::abs(std::frexp(factor, &exponent)) == 0.5;
}

/// Gradients in their own dtype. If .grad is a view of home already, it is scaled in place. If gradients are to be views and it is
/// none, it becomes one.
class HomePacker final : public Packer {
 public:
  // A gradient that moved home is only there: two factors in turn round twice, unless the first is a power of two. In fp16 not even then,
  // since many gradients there are subnormal.
  [[nodiscard]] double packAhead(BucketMemory& memory, const Slot& slot, double guess) override {
    const bool exact = !memory.gradsAreViews() || (isPowerOfTwo(guess) && memory.dtype() != at::kHalf);
    const double factor = exact ? guess : 1.0;
    pack(memory, slot, factor);
    return factor;
  }

  void repack(BucketMemory& memory, const Slot& slot, double before, double factor) override {
    const at::Tensor& grad = slot.param.grad();
    const bool moved = memory.gradsAreViews() && grad.defined() && BucketMemory::isHome(grad, slot);
    pack(memory, slot, moved ? factor / before : factor);
  }

  void pack(BucketMemory& memory, const Slot& slot, double factor) override {
    at::Tensor& grad = slot.param.mutable_grad();
    const bool same_type = grad.defined() && grad.scalar_type() == memory.dtype();
    const bool in_place = grad.defined() && memory.gradsAreViews() && BucketMemory::isHome(grad, slot);
    const bool scales = factor != 1.0;
    if (same_type && memory.dtype() == at::kFloat && grad.is_cpu() && BucketMemory::isPlain(grad, slot)) {
      // The usual case without torch's dispatcher, which costs more than a small gradient does.
      auto* out = static_cast<float*>(memory.home.data_ptr()) + slot.offset;
      const auto* in = static_cast<const float*>(grad.const_data_ptr());
      if (!in_place || scales) {
        convert(DType::Float32, out, DType::Float32, in, slot.numel, static_cast<float>(factor));
      }
      if (in_place && scales) {
        BucketMemory::bumpVersion(slot.view);
      }
    } else if (!in_place || scales) {
      packByTorch(slot.view, grad, factor);
    }
    if (memory.gradsAreViews() && grad.defined() && !in_place) {
      grad = slot.view;
    }
  }

  void unpack(BucketMemory& memory, const std::vector<size_t>& slots, double /*factor*/) const override {
    for (const size_t index : slots) {
      const Slot& slot = memory.slots[index];
      const at::Tensor& grad = memory.gradientOf(slot);
      if (!BucketMemory::isHome(grad, slot)) {
        grad.copy_(slot.view);
      }
    }
  }
};

// --- cast -----------------------------------------------------------------------------------------

constexpr size_t kBlock = 4096; // elements looked at and cast while they are in the first-level cache

/// Gradients on the CPU, cast on their way. .grad keeps its own memory until it gets the average: a bucket can be packed again.
class CastPacker final : public Packer {
 public:
  void begin() override {
    magnitude_ = {};
  }

  void pack(BucketMemory& memory, const Slot& slot, double factor) override {
    if (slot.numel == 0) {
      return;
    }
    const at::Tensor& cast = memory.cast;
    const size_t element = cast.element_size();
    auto* out = static_cast<char*>(cast.data_ptr()) + slot.offset * element;
    at::Tensor grad = slot.param.grad();
    if (!grad.defined()) {
      std::fill_n(out, slot.numel * element, char{0});
      return;
    }
    // magnitudeOf() wants fp32, and flat memory wants plain elements in the slot's order; gradients have all nearly always.
    const bool measures = memory.tail.defined();
    const at::ScalarType source_type = measures ? at::kFloat : memory.dtype();
    if (grad.scalar_type() != source_type || !BucketMemory::isPlain(grad, slot)) {
      grad = BucketMemory::emptyLike(slot, grad.options().dtype(source_type)).copy_(grad);
    }
    const auto* in = static_cast<const char*>(grad.const_data_ptr());
    const size_t source_element = grad.element_size();
    for (size_t at = 0; at < slot.numel; at += kBlock) {
      const size_t count = std::min(kBlock, slot.numel - at);
      const char* block = in + at * source_element;
      if (measures) {
        const Magnitude here = magnitudeOf(reinterpret_cast<const float*>(block), count);
        magnitude_ = {std::max(magnitude_.max_bits, here.max_bits), magnitude_.non_finite || here.non_finite};
      }
      convert(
          toDType(cast.scalar_type()),
          out + at * element,
          toDType(source_type),
          block,
          count,
          static_cast<float>(factor));
    }
  }

  void writeMagnitude(const BucketMemory& memory, int rank, double ratio) const override {
    auto* sizes = static_cast<at::Half*>(memory.tail.data_ptr());
    std::fill_n(sizes, memory.tail.numel(), at::Half(0.0F));
    sizes[rank] = at::Half(ExponentCode::of(magnitude_, ratio));
  }

  void unpack(BucketMemory& memory, const std::vector<size_t>& slots, double factor) const override {
    const at::Tensor& cast = memory.cast;
    const auto* sums = static_cast<const char*>(cast.const_data_ptr());
    for (const size_t index : slots) {
      const Slot& slot = memory.slots[index];
      const at::Tensor& grad = memory.gradientOf(slot);
      if (slot.numel == 0) {
        continue;
      }
      const at::ScalarType dtype = memory.dtype();
      const bool direct = grad.scalar_type() == dtype && BucketMemory::isPlain(grad, slot);
      const at::Tensor target = direct ? grad : BucketMemory::emptyLike(slot, grad.options().dtype(dtype));
      convert(
          toDType(dtype),
          target.data_ptr(),
          toDType(cast.scalar_type()),
          sums + slot.offset * cast.element_size(),
          slot.numel,
          static_cast<float>(factor));
      if (direct) {
        BucketMemory::bumpVersion(grad);
      } else {
        grad.copy_(target);
      }
    }
  }

 private:
  Magnitude magnitude_; ///< of the gradients packed since begin(), if the bucket has a tail
};

// --- sparse ---------------------------------------------------------------------------------------

/// One sparse gradient, coalesced: home is a tensor of its own, because the all-reduce puts other elements into it, and .grad is the
/// user's until unpack().
class SparsePacker final : public Packer {
 public:
  void pack(BucketMemory& memory, const Slot& slot, double factor) override {
    const at::Tensor& grad = slot.param.grad();
    memory.home = grad.defined() ? grad.coalesce().mul(factor) : emptySparse(slot.param);
  }

  void packZeros(BucketMemory& memory) const override {
    memory.home = emptySparse(memory.slots[0].param);
  }

  void takeResult(BucketMemory& memory, const at::Tensor& result) const override {
    TORCH_CHECK(
        result.is_sparse() && result.sizes() == memory.slots[0].param.sizes(),
        "the comm hook was given a sparse gradient and did not return a sparse tensor of its shape");
    memory.home = result;
  }

  void unpack(BucketMemory& memory, const std::vector<size_t>& slots, double /*factor*/) const override {
    if (!slots.empty()) {
      memory.slots[0].param.mutable_grad() = memory.home;
    }
    memory.home.reset(); // its elements belong to .grad now
  }
};

// --- fused ----------------------------------------------------------------------------------------

constexpr int64_t kStatsNumel = sizeof(cuda::PackStats) / sizeof(int32_t);

/// Whether there are kernels that leave the dtype as it is.
bool hasKernel(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16;
}

/// Gradients on a CUDA device: all slots of a bucket are packed by seal() and unpacked together, one kernel each. A gradient of another
/// dtype or memory order, or with a negation pending, goes through a copy.
class FusedPacker final : public Packer {
 public:
  /// `runtime`: lives as long as the process.
  explicit FusedPacker(cuda::DeviceRuntime& runtime) : runtime_(runtime) {}

  void begin() override {
    stats_.reset();
  }

  void pack(BucketMemory& /*memory*/, const Slot& /*slot*/, double /*factor*/) override {}

  void seal(BucketMemory& memory, double factor, bool streams_differ) override {
    const at::ScalarType type = kernelType(memory);
    const at::Tensor flat = memory.travelling();
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
    const c10::DeviceGuard guard(memory.device());
    if (memory.tail.defined()) {
      stats_ = at::zeros({kStatsNumel}, at::TensorOptions().dtype(at::kInt).device(memory.device()));
    }
    cuda::packBucket(
        runtime_,
        planOf(memory, gradients, toDType(type)),
        toDType(type),
        toDType(flat.scalar_type()),
        flat.data_ptr(),
        static_cast<float>(factor),
        stats_.defined() ? static_cast<cuda::PackStats*>(stats_.data_ptr()) : nullptr,
        streamHandle(memory));
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
  void writeMagnitude(const BucketMemory& memory, int rank, double ratio) const override {
    if (!stats_.defined()) {
      memory.tail.zero_(); // zeros were packed
      return;
    }
    cuda::ExponentArgs args;
    args.stats = static_cast<const cuda::PackStats*>(stats_.const_data_ptr());
    args.tail = static_cast<uint16_t*>(memory.tail.data_ptr());
    args.numel = static_cast<uint32_t>(memory.tail.numel());
    args.rank = static_cast<uint32_t>(rank);
    const c10::DeviceGuard guard(memory.device());
    runtime_.writeExponent(args, streamHandle(memory));
    if (const int shift = ExponentCode::exponentOf(ratio); shift != 0) {
      at::Tensor code = memory.tail.narrow(0, rank, 1);
      const at::Tensor flag = code.ge(ExponentCode::kNonFinite).to(code.scalar_type()).mul(ExponentCode::kNonFinite);
      const at::Tensor plain = code.sub(flag);
      const at::Tensor shifted = plain.add(shift).clamp(ExponentCode::kLowest, ExponentCode::kHighest);
      code.copy_(at::where(plain.gt(0), shifted, plain).add(flag));
    }
  }

  void unpack(BucketMemory& memory, const std::vector<size_t>& slots, double factor) const override {
    const at::ScalarType type = kernelType(memory);
    std::vector<at::Tensor> targets(memory.slots.size()); // those undefined are left out
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
    const at::Tensor flat = memory.travelling();
    const c10::DeviceGuard guard(memory.device());
    cuda::unpackBucket(
        runtime_,
        planOf(memory, targets, toDType(type)),
        toDType(type),
        toDType(flat.scalar_type()),
        flat.data_ptr(),
        static_cast<float>(factor),
        streamHandle(memory));
    for (const auto& [to, from] : copies) {
      to.copy_(from);
    }
  }

 private:
  /// The dtype that kernels take this bucket's gradients in: their own, else float32.
  static at::ScalarType kernelType(const BucketMemory& memory) {
    const at::ScalarType wire = memory.travelling().scalar_type();
    return hasKernel(memory.dtype()) && (wire == memory.dtype() || wire == at::kFloat) ? memory.dtype() : at::kFloat;
  }

  static cuda::FusedBucket planOf(const BucketMemory& memory, const std::vector<at::Tensor>& gradients, DType dtype) {
    std::vector<cuda::Gradient> places;
    places.reserve(gradients.size());
    for (size_t i = 0; i < gradients.size(); ++i) {
      places.push_back({gradients[i].defined() ? gradients[i].data_ptr() : nullptr, memory.slots[i].numel});
    }
    return cuda::planFusedBucket(places.data(), places.size(), dtype);
  }

  static void* streamHandle(const BucketMemory& memory) {
    const c10::Device device = memory.device();
    return c10::impl::VirtualGuardImpl(device.type()).getStreamNativeHandle(currentStream(device));
  }

  cuda::DeviceRuntime& runtime_;
  at::Tensor stats_; ///< a PackStats of the gradients sealed since begin(), if the bucket has a tail
};

} // namespace

// --- all ------------------------------------------------------------------------------------------

void Packer::takeResult(BucketMemory& memory, const at::Tensor& returned) const {
  const at::Tensor& home = memory.home;
  // torch's collectives take a complex tensor as a real one with one more dimension, and hooks hand on what they give.
  const bool as_real = home.is_complex() && !returned.is_complex() && returned.dim() > 0 && returned.size(-1) == 2;
  const at::Tensor result = as_real ? at::view_as_complex(returned.contiguous()) : returned;
  TORCH_CHECK(
      result.numel() == home.numel(),
      "the comm hook returned ",
      returned.numel(),
      " elements for a bucket of ",
      home.numel());
  const bool in_place = result.dim() == 1 && result.scalar_type() == memory.dtype() && result.is_alias_of(home) &&
      result.data_ptr() == home.data_ptr() && result.is_contiguous() && !result.is_neg() && !result.is_conj();
  if (!in_place) {
    home.copy_(result.reshape({-1}));
  }
}

std::unique_ptr<Packer> makePacker(const BucketMemory& memory, const std::string& cuda_library) {
  if (!memory.device().is_cpu()) {
    cuda::DeviceRuntime& runtime = cuda::cudaLibrary(cuda_library);
    const c10::DeviceGuard guard(memory.device());
    runtime.checkDevice();
    if (!memory.sparse() && (memory.cast.defined() || hasKernel(memory.dtype()))) {
      return std::make_unique<FusedPacker>(runtime);
    }
  }
  if (memory.sparse()) {
    return std::make_unique<SparsePacker>();
  }
  if (memory.cast.defined()) {
    return std::make_unique<CastPacker>();
  }
  return std::make_unique<HomePacker>();
}

at::Tensor emptySparse(const at::Tensor& param) {
  const auto options = param.options().requires_grad(false);
  std::vector<int64_t> values = param.sizes().vec();
  values.at(0) = 0;
  const at::Tensor indices = at::empty({1, 0}, options.dtype(at::kLong));
  return at::_sparse_coo_tensor_unsafe(indices, at::empty(values, options), param.sizes())._coalesced_(true);
}

c10::Stream currentStream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

} // namespace pycomm
