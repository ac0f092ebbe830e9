#include "ddp/wire.h"

#include <ATen/core/TensorBody.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"
#include "c10d/exact_sums.h"
#include "ddp/bucket_memory.h"
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

constexpr int kTopAim = 9;
constexpr int kTopHighest = 15;
constexpr int kTopLowest = 0;

// 2^s and 2^-s must both be normal fp32 numbers; and so must 2^s times a ratio of PassWeights, which is up to ranks * passes.
constexpr int kExponentLimit = 126;
constexpr int kExponentLimitOfWeighed = 100;

constexpr int kAllZeroCode = 0;

int ceilLog2(int value) {
  int log = 0;
  while ((int64_t{1} << log) < value) {
    ++log;
  }
  return log;
}

/// The power of two that one fp16 bucket is multiplied by before its gradients are cast, the same on every rank.
///
/// Rank r holds gradients g_r, its largest magnitude lies below 2^e_r (frexp's exponent), N ranks average:
///
///     packed    q_r = fp16(g_r * 2^s)
///     reduced   Q   = q_0 + … + q_(N-1)               (the group's SUM)
///     unpacked  g   = fp32(Q) * 2^-s / N
///
/// Multiplying by 2^s rounds nothing, so s only decides which values are outside fp16's range: sums of 65520 and more
/// become Inf, values under 2^-14 lose bits. With E = max_r e_r and L = ceil(log2 N) every |Q| stays below
/// 2^top with top = E + L + s. The rule keeps `top` in a window:
///
///     aim at          top = 9           gradients down to 2^(L-23) of the largest keep all 11 bits, growth by 64 fits
///     good as it is   0 <= top <= 15    … down to 2^(L-14) at the lower end
///     otherwise       the bucket is packed and reduced once more, with the s that makes top = 9
///
/// The first step starts with s = 0; buckets that are cut anew start with the least s of those they come from.
///
/// How the ranks agree on E without another message: a bucket ends with N further elements, one per rank. A rank writes
/// e_r + ExponentCode::kBias into its own and zero into the others, so that the SUM hands every rank all e_r, exactly, whatever the
/// algorithm: each is an integer below 2048 plus zeros. All decisions follow from these numbers and from s, which all
/// ranks share, so they need no look at the result, and a cancelling sum (large gradients, small average) cannot
/// mislead them. If a rank's gradients hold Inf or NaN before packing, it adds kNonFinite to its element, and e_r is that of its
/// finite ones: these keep their bits, the others stay Inf or NaN as in an fp32 sum, and the bucket is counted.
///
/// Example, N = 2, s = 0: rank 0 has a largest gradient 100000 (e = 17), rank 1 has 3 (e = 2). E = 17, L = 1, top = 18:
/// the fp16 sum holds Inf. Both ranks read 17 and 2, take s = 9 - 17 - 1 = -9, pack again: 100000 * 2^-9 = 195.3 fits.
class ScaledWire final : public Wire {
 public:
  ScaledWire(int world_size, int exponent, bool weighed)
      : world_size_(world_size),
        exponent_limit_(weighed ? kExponentLimitOfWeighed : kExponentLimit),
        // A checkpoint may have one of a wrapper without weights.
        exponent_(std::clamp(exponent, -exponent_limit_, exponent_limit_)),
        next_exponent_(exponent_) {}

  [[nodiscard]] std::optional<at::ScalarType> castTo() const override {
    return at::kHalf;
  }
  [[nodiscard]] size_t tail() const override {
    return static_cast<size_t>(world_size_);
  }
  [[nodiscard]] double packFactor(int /*divisor*/) const override {
    return std::ldexp(1.0F, exponent_); // 2^s
  }
  [[nodiscard]] double unpackFactor(int divisor) const override {
    return std::ldexp(1.0F, -exponent_) / static_cast<float>(divisor); // 2^-s / divisor
  }
  [[nodiscard]] Verdict judge(const at::Tensor& tail) override {
    const Judgement judgement = judgeBy(tail);
    next_exponent_ = judgement.next_exponent;
    if (judgement.verdict == Verdict::Overflowed || judgement.verdict == Verdict::Underflowed) {
      exponent_ = next_exponent_;
    }
    return judgement.verdict;
  }
  [[nodiscard]] bool accepts(const at::Tensor& tail) const override {
    try {
      const Verdict verdict = judgeBy(tail).verdict;
      return verdict == Verdict::Good || verdict == Verdict::NonFinite;
    } catch (const Error&) { // judge() throws it, when the bucket is awaited
      return false;
    }
  }
  std::optional<int> commit() noexcept override {
    exponent_ = next_exponent_;
    return exponent_;
  }

 private:
  struct Judgement {
    Verdict verdict;
    int next_exponent; ///< the s that makes top = 9
  };

  /// Throws Error(DataCorrupt) if the tail cannot be the sums of N ranks' ExponentCode: the backend did not sum.
  [[nodiscard]] Judgement judgeBy(const at::Tensor& tail) const {
    const at::Tensor sizes = tail.cpu();
    const auto* each = static_cast<const at::Half*>(sizes.const_data_ptr());
    int highest = kAllZeroCode;
    bool non_finite = false;
    for (int rank = 0; rank < world_size_; ++rank) {
      const float value = each[rank];
      const bool flagged = value >= static_cast<float>(ExponentCode::kNonFinite); // false for NaN
      const float code = flagged ? value - static_cast<float>(ExponentCode::kNonFinite) : value;
      const bool known = code == static_cast<float>(kAllZeroCode) ||
          (code >= static_cast<float>(ExponentCode::kLowest) && code <= static_cast<float>(ExponentCode::kHighest) &&
           code == std::floor(code));
      if (!known) {
        throw Error(
            ErrorCode::DataCorrupt,
            "the fp16 gradient bucket came back from the all-reduce with " + std::to_string(value) +
                " where the group's rank " + std::to_string(rank) + " had written the size of its gradients",
            "a backend that adds fp16 elements exactly when all but one are zero; lossy codecs cannot carry this bucket");
      }
      highest = std::max(highest, static_cast<int>(code));
      non_finite = non_finite || flagged;
    }
    const Verdict accepted = non_finite ? Verdict::NonFinite : Verdict::Good;
    if (highest == kAllZeroCode) {
      return {accepted, exponent_};
    }
    const int sum_exponent = highest - ExponentCode::kBias + ceilLog2(world_size_); // E + L
    const int top = sum_exponent + exponent_;
    const int next = std::clamp(kTopAim - sum_exponent, -exponent_limit_, exponent_limit_);
    if ((top >= kTopLowest && top <= kTopHighest) || next == exponent_) {
      return {accepted, next};
    }
    return {next < exponent_ ? Verdict::Overflowed : Verdict::Underflowed, next};
  }

  int world_size_;
  int exponent_limit_;
  int exponent_; ///< s
  int next_exponent_; ///< of the next step
};

/// Sums of fp32 that are encoded inside the all-reduce.
class EncodedWire final : public Wire {
 public:
  /// `cast`: of gradients of another dtype. `residual`: float32, or undefined. `next`: another one, if a step may be summed again; else the same.
  EncodedWire(Codec codec, std::optional<at::ScalarType> cast, at::Tensor residual, at::Tensor next)
      : codec_(codec), cast_(cast), residual_(std::move(residual)), next_residual_(std::move(next)) {}

  [[nodiscard]] std::optional<at::ScalarType> castTo() const override {
    return cast_;
  }
  [[nodiscard]] bool encodes() const override {
    return true;
  }
  [[nodiscard]] bool inPlace() const override {
    return false;
  }
  // Also if they are cast: so residuals of all dtypes are in units of the average, whose divisor may change.
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
  [[nodiscard]] c10::intrusive_ptr<c10d::Work> allReduce(const ReducerGroup& group, const at::Tensor& travelling)
      override {
    if (!next_residual_.is_same(residual_)) {
      next_residual_.copy_(residual_);
    }
    return group.codecBackend()->allreduceAs(codec_, {travelling}, next_residual_);
  }
  void takeResidual() noexcept override {
    std::swap(residual_, next_residual_);
  }
  [[nodiscard]] at::Tensor residual() const override {
    return residual_;
  }

 private:
  Codec codec_;
  std::optional<at::ScalarType> cast_;
  at::Tensor residual_;
  at::Tensor next_residual_; ///< the all-reduce reads and writes it
};

} // namespace

size_t Wire::nbytes(const at::Tensor& travelling) const {
  const bool sparse = travelling.layout() == at::kSparse;
  return sparse ? travelling._indices().nbytes() + travelling._values().nbytes() : travelling.nbytes();
}

c10::intrusive_ptr<c10d::Work> Wire::allReduce(const ReducerGroup& group, const at::Tensor& travelling) {
  std::vector<at::Tensor> tensors{travelling};
  const ExactSums exact; // the wrapper's wire_dtype decides, and not the group's
  return group.get()->allreduce(tensors);
}

std::unique_ptr<Wire> makeWire(const WireContext& context, const ReducedParam& param, size_t numel, int exponent) {
  if (param.sparse || context.hook_averages) {
    return std::make_unique<OwnWire>(context.hook_averages);
  }
  if (param.wire_dtype == at::kHalf) {
    return std::make_unique<ScaledWire>(context.group.size(), exponent, context.options.weighs);
  }
  const bool casts = param.wire_dtype.value_or(param.tensor.scalar_type()) != param.tensor.scalar_type();
  if (param.codec != Codec::None) {
    const bool keeps = context.options.error_feedback;
    const at::Tensor residual = keeps ? FlatMemory::zeros(numel, at::kFloat) : at::Tensor();
    const at::Tensor next = keeps && context.options.elastic ? FlatMemory::zeros(numel, at::kFloat) : residual;
    return std::make_unique<EncodedWire>(param.codec, casts ? param.wire_dtype : std::nullopt, residual, next);
  }
  if (casts) {
    return std::make_unique<CastWire>(*param.wire_dtype);
  }
  return std::make_unique<OwnWire>(/*hook_averages=*/false);
}

int ExponentCode::exponentOf(double ratio) {
  int exponent = 0;
  const double mantissa = std::frexp(ratio, &exponent); // 0.5 to below 1
  return mantissa == 0.5 ? exponent - 1 : exponent;
}

float ExponentCode::of(Magnitude magnitude, double ratio) {
  const int flag = magnitude.non_finite ? kNonFinite : 0;
  if (magnitude.max_bits == 0) {
    return static_cast<float>(kAllZeroCode + flag);
  }
  float largest = 0;
  std::memcpy(&largest, &magnitude.max_bits, sizeof largest);
  int exponent = 0;
  (void)std::frexp(largest, &exponent);
  return static_cast<float>(std::clamp(exponent + kBias + exponentOf(ratio), kLowest, kHighest) + flag);
}

} // namespace pycomm
