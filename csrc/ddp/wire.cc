#include "ddp/wire.h"

#include <ATen/core/TensorBody.h>

#include <utility>

#include "base/error.h"
#include "c10d/exact_sums.h"
#include "ddp/flat_memory.h"
#include "ddp/packer.h"
#include "schedule/select.h"

namespace pycomm {
namespace {

class OwnWire final : public Wire {
 public:
  explicit OwnWire(bool hook_averages) : hook_averages_(hook_averages) {}

  [[nodiscard]] bool inPlace() const override {
    return !hook_averages_; // a hook's collectives get whatever tensors it makes
  }
  [[nodiscard]] double packFactor(int divisor) const override {
    return hook_averages_ ? 1.0 : 1.0 / divisor;
  }
  [[nodiscard]] double unpackFactor(int /*divisor*/) const override {
    return 1.0;
  }

 private:
  bool hook_averages_;
};

class CastWire final : public Wire {
 public:
  explicit CastWire(at::ScalarType dtype) : dtype_(dtype) {}

  [[nodiscard]] std::optional<at::ScalarType> castTo() const override {
    return dtype_;
  }
  [[nodiscard]] double packFactor(int /*divisor*/) const override {
    return 1.0;
  }
  [[nodiscard]] double unpackFactor(int divisor) const override {
    return 1.0 / divisor;
  }

 private:
  at::ScalarType dtype_;
};

/// See WireScale.
class ScaledWire final : public Wire {
 public:
  ScaledWire(int rank, int world_size, int exponent)
      : rank_(rank), world_size_(world_size), scale_(world_size, exponent) {}

  [[nodiscard]] std::optional<at::ScalarType> castTo() const override {
    return at::kHalf;
  }
  [[nodiscard]] size_t tail() const override {
    return static_cast<size_t>(world_size_);
  }
  [[nodiscard]] double packFactor(int /*divisor*/) const override {
    return scale_.packFactor();
  }
  [[nodiscard]] double unpackFactor(int divisor) const override {
    return scale_.unpackFactor(divisor);
  }
  void seal(const at::Tensor& tail, const Packer& packer, double ratio) const override {
    packer.writeMagnitude(tail, rank_, ratio);
  }
  [[nodiscard]] Verdict judge(const at::Tensor& tail) override {
    const int before = scale_.exponent();
    switch (scale_.judge(sizesIn(tail))) {
      case WireScale::Outcome::Good:
        return Verdict::Good;
      case WireScale::Outcome::NonFinite:
        return Verdict::NonFinite;
      case WireScale::Outcome::PackAgain:
        break;
    }
    return scale_.exponent() < before ? Verdict::Overflowed : Verdict::Underflowed;
  }
  [[nodiscard]] bool accepts(const at::Tensor& tail) const override {
    WireScale trial = scale_;
    try {
      return trial.judge(sizesIn(tail)) != WireScale::Outcome::PackAgain;
    } catch (const Error&) { // judge() throws it, when the bucket is awaited
      return false;
    }
  }
  std::optional<int> commit() noexcept override {
    scale_.finishStep();
    return scale_.exponent();
  }

 private:
  static std::vector<float> sizesIn(const at::Tensor& tail) {
    const at::Tensor sizes = tail.cpu();
    const auto* each = static_cast<const at::Half*>(sizes.const_data_ptr());
    return {each, each + sizes.numel()};
  }

  int rank_;
  int world_size_;
  WireScale scale_;
};

/// Another wire of fp32, whose sums are encoded inside the all-reduce.
class EncodedWire final : public Wire {
 public:
  EncodedWire(std::unique_ptr<Wire> inner, Codec codec, c10::intrusive_ptr<PycommBackend> backend, at::Tensor residual)
      : inner_(std::move(inner)), codec_(codec), backend_(std::move(backend)), residual_(std::move(residual)) {}

  [[nodiscard]] std::optional<at::ScalarType> castTo() const override {
    return inner_->castTo();
  }
  [[nodiscard]] bool inPlace() const override {
    return false;
  }
  // Whatever the inner wire would do: so residuals of all dtypes are in units of the average, whose divisor may change.
  [[nodiscard]] double packFactor(int divisor) const override {
    return 1.0 / divisor;
  }
  [[nodiscard]] double unpackFactor(int /*divisor*/) const override {
    return 1.0;
  }
  [[nodiscard]] size_t nbytes(const at::Tensor& travelling) const override {
    // The backend sends small tensors as they are.
    const bool encodes = static_cast<int64_t>(travelling.nbytes()) >= kMinEncodedNbytes;
    return encodes ? static_cast<size_t>(encodedNbytes(codec_, travelling.numel())) : travelling.nbytes();
  }
  [[nodiscard]] c10::intrusive_ptr<c10d::Work> allReduce(c10d::ProcessGroup& /*group*/, const at::Tensor& travelling)
      const override {
    return backend_->allreduceAs(codec_, {travelling}, residual_);
  }
  [[nodiscard]] at::Tensor residual() const override {
    return residual_;
  }

 private:
  std::unique_ptr<Wire> inner_; ///< own or cast
  Codec codec_;
  c10::intrusive_ptr<PycommBackend> backend_;
  at::Tensor residual_; ///< float32
};

} // namespace

size_t Wire::nbytes(const at::Tensor& travelling) const {
  const bool sparse = travelling.layout() == at::kSparse;
  return sparse ? travelling._indices().nbytes() + travelling._values().nbytes() : travelling.nbytes();
}

c10::intrusive_ptr<c10d::Work> Wire::allReduce(c10d::ProcessGroup& group, const at::Tensor& travelling) const {
  std::vector<at::Tensor> tensors{travelling};
  const ExactSums exact; // the wrapper's wire_dtype decides, and not the group's
  return group.allreduce(tensors);
}

std::unique_ptr<Wire> makeWire(const WireOptions& options, at::ScalarType dtype, size_t numel) {
  if (options.sparse) {
    return std::make_unique<OwnWire>(options.hook_averages);
  }
  if (options.dtype == at::kHalf) {
    return std::make_unique<ScaledWire>(options.rank, options.world_size, options.exponent);
  }
  std::unique_ptr<Wire> wire;
  if (options.dtype.value_or(dtype) == dtype) {
    wire = std::make_unique<OwnWire>(options.hook_averages);
  } else {
    wire = std::make_unique<CastWire>(*options.dtype);
  }
  if (options.codec == Codec::None) {
    return wire;
  }
  at::Tensor residual = options.error_feedback ? FlatMemory::zerosInPages(numel, at::kFloat) : at::Tensor();
  return std::make_unique<EncodedWire>(std::move(wire), options.codec, options.backend, std::move(residual));
}

} // namespace pycomm
