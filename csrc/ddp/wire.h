#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstdint>
#include <memory>
#include <optional>

#include "ddp/reducer_group.h"
#include "ddp/reducer_options.h"
#include "device/kernel_args.h"
#include "numeric/convert.h"

namespace pycomm {

/// The result of judging the sums of a bucket.
enum class Verdict {
  Good,
  NonFinite, ///< some rank's gradients held Inf or NaN before they were packed; the result keeps them
  Overflowed, ///< the scale was too large: pack and reduce the same gradients again
  Underflowed, ///< too small: likewise
};

/// How a bucket travels: in which dtype, by which factors sums become averages, and which all-reduce adds them up.
///
///     wire             packed                 reduced                    average
///     own              home = g / N           SUM                        home
///     own, comm hook   home = g               by the hook                the hook's result
///     cast             cast = dtype(g)        SUM                        cast / N
///     scaled           cast = fp16(g * 2^s)   SUM, and of the tail       cast * 2^-s / N, or all once more
///     encoded          (cast =) fp32(g) / N   SUM + residual, by a codec home, or cast
///
/// N is the divisor of the step: all ranks, or in join(divide_by_initial_world_size=False) those that still have data. Where ranks count by
/// weights, g is the gradient times the ratio of PassWeights. Another kind of wire is one more class, and a line in makeWire(); a tail is
/// the fp16 scale's.
///
/// fp16 is scaled; bf16 and another float dtype are cast; int8 is encoded: see makeWire() and bindings/ddp.cc wireOf().
///
/// A wire keeps the state that the next step needs besides averages: the scale's exponent, and the residual of a codec. The exponent of the next
/// step is there after commit(). The all-reduce itself writes the residual, because it makes the sums.
///
/// A residual's life:
///
///     made        BucketSet::cut, makeWire       zeros, as after Reducer::resetState. With elastic two of them: one as it was before the step,
///                                                one for the all-reduce
///     written     BucketPipeline::launch,        on the data loop while the bucket travels (LocalSteps::runCodec). If it is too small to be encoded,
///                 PycommBackend::allreduceAs     at once: added to the gradients, and zeros (addResidual)
///     settled     BucketPipeline::write          with elastic the two change places (takeResidual); unused parameters take back what they packed
///                                                (takeBack). As the bucket ends, which may be while backward runs; with elastic once all
///                                                ranks have all sums
///     forgotten   Reducer::commit                zeros, as an average is not finite; one of another wrapper: Reducer::forgetResiduals, after commit()
///     scaled      Reducer::scaleResiduals        by the program
///     moved       BucketSet::cut                 to the new bucket, or aside while its parameter is frozen
///     copied      Reducer::residuals             for a checkpoint; not while a pass reduces, nor once it has failed
///     loaded      BucketSet::setResiduals        from one
///
/// Without elastic none is left of before the step: an encoded bucket is launched once.
class Wire {
 public:
  Wire() = default;
  virtual ~Wire() = default;
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  /// The dtype of the second tensor, which travels; none: gradients travel from their own.
  [[nodiscard]] virtual std::optional<at::ScalarType> castTo() const {
    return std::nullopt;
  }
  /// Elements that travel behind the gradients: see ExponentCode.
  [[nodiscard]] virtual size_t tail() const {
    return 0;
  }
  /// Whether the sums are not exact.
  [[nodiscard]] virtual bool encodes() const {
    return false;
  }
  /// Whether the all-reduce reads and writes the bucket's memory as it is: then the ranks of a host may share that memory.
  [[nodiscard]] virtual bool inPlace() const {
    return true;
  }
  [[nodiscard]] virtual double packFactor(int divisor) const = 0;
  [[nodiscard]] virtual double unpackFactor(int divisor) const = 0;

  /// The bytes of an all-reduce of `travelling`, as they travel.
  [[nodiscard]] virtual size_t nbytes(const at::Tensor& travelling) const;
  [[nodiscard]] virtual c10::intrusive_ptr<c10d::Work> allReduce(
      const ReducerGroup& group,
      const at::Tensor& travelling);
  /// After the all-reduce, the same on all ranks. If it is Overflowed or Underflowed, packFactor() has changed.
  [[nodiscard]] virtual Verdict judge(const at::Tensor& /*tail*/) {
    return Verdict::Good;
  }
  /// Whether judge() would accept the sums. False also if it would throw.
  [[nodiscard]] virtual bool accepts(const at::Tensor& /*tail*/) const {
    return true;
  }
  /// The step is over: its scale is replaced by the next one's. Returns the s of that, or nothing without an fp16 scale.
  virtual std::optional<int> commit() noexcept {
    return std::nullopt;
  }
  /// The sums of this step count: residual() is what the all-reduce has left.
  virtual void takeResidual() noexcept {}
  /// What this rank's codec has lost and not sent yet, in the order of the bucket: undefined without error feedback.
  [[nodiscard]] virtual at::Tensor residual() const {
    return {};
  }
};

/// What the wires of a reducer have in common.
struct WireContext {
  const ReducerOptions& options;
  const ReducerGroup& group;
  bool hook_averages; ///< a comm hook gets the plain gradients, and its result is final
};

/// For `numel` gradients of `param`'s kind. `exponent`: the fp16 scale's first, the same on every rank.
[[nodiscard]] std::unique_ptr<Wire> makeWire(
    const WireContext& context,
    const ReducedParam& param,
    size_t numel,
    int exponent);

/// What a rank writes to its element of an fp16 bucket's tail, an integer below 1024: see ScaledWire. It is frexp's exponent plus kBias, or 0 for all
/// zeros; plus kNonFinite if there was an Inf or NaN. All are exact in fp16.
struct ExponentCode {
  static constexpr int kBias = cuda::kExponentBias;
  static constexpr int kNonFinite = cuda::kNonFiniteCode;
  /// The codes of numbers other than zero, without kNonFinite.
  static constexpr int kLowest = kBias - 148; // frexp() of an fp32 number gives -148 (the least subnormal) to 128,
  static constexpr int kHighest = kBias + 128; // so that codes are 52 to 328

  /// `magnitude`: of its gradients, which are packed times `ratio` and 2^s. It counts as the next power of two.
  [[nodiscard]] static float of(Magnitude magnitude, double ratio = 1.0);
  /// The exponent that `ratio` adds: 0 if it is 1.
  [[nodiscard]] static int exponentOf(double ratio);
};

} // namespace pycomm
