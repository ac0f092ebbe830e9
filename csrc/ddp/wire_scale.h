#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/kernel_args.h"
#include "numeric/convert.h"

namespace pycomm {

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
/// e_r + kBias into its own and zero into the others, so that the SUM hands every rank all e_r, exactly, whatever the
/// algorithm: each is an integer below 2048 plus zeros. All decisions follow from these numbers and from s, which all
/// ranks share, so they need no look at the result, and a cancelling sum (large gradients, small average) cannot
/// mislead them. If a rank's gradients hold Inf or NaN before packing, it adds kNonFinite to its element, and e_r is that of its
/// finite ones: these keep their bits, the others stay Inf or NaN as in an fp32 sum, and the bucket is counted.
///
/// Example, N = 2, s = 0: rank 0 has a largest gradient 100000 (e = 17), rank 1 has 3 (e = 2). E = 17, L = 1, top = 18:
/// the fp16 sum holds Inf. Both ranks read 17 and 2, take s = 9 - 17 - 1 = -9, pack again: 100000 * 2^-9 = 195.3 fits.
class WireScale {
 public:
  enum class Outcome {
    Good, ///< unpack; the next step uses the exponent that aims at top = 9
    PackAgain, ///< exponent() has changed; pack and reduce the same gradients once more
    NonFinite, ///< as Good, but some rank's gradients were Inf or NaN before packing
  };

  /// exponentCode() adds kBias to frexp's exponent, or is 0 for all zeros; and kNonFinite if there was an Inf or NaN. All are exact in fp16.
  static constexpr int kBias = cuda::kExponentBias;
  static constexpr int kNonFinite = cuda::kNonFiniteCode;

  /// `exponent`: the s to start with, the same on every rank.
  explicit WireScale(int world_size, int exponent = 0);

  [[nodiscard]] int exponent() const noexcept {
    return exponent_;
  }
  /// 2^s.
  [[nodiscard]] float packFactor() const;
  /// 2^-s / divisor: the ranks that take part, N, or fewer while others have run out of data.
  [[nodiscard]] float unpackFactor(int divisor) const;

  /// The value of a rank's own element, an integer below 1024. `magnitude`: of its gradients, which are packed times `ratio` and 2^s. It counts
  /// as the next power of two.
  [[nodiscard]] static float exponentCode(Magnitude magnitude, double ratio = 1.0);
  /// The exponent that `ratio` adds: 0 if it is 1.
  [[nodiscard]] static int exponentOf(double ratio);
  /// The codes of numbers other than zero, without kNonFinite.
  static constexpr int kLowestCode = kBias - 148; // frexp() of an fp32 number gives -148 (the least subnormal) to 128,
  static constexpr int kHighestCode = kBias + 128; // so that codes are 52 to 328: exact in fp16

  /// Judges a reduced bucket by its N last elements. Throws Error(DataCorrupt) if they cannot be the sums of N
  /// ranks' exponentCode(): the backend did not sum.
  [[nodiscard]] Outcome judge(const std::vector<float>& slots);
  /// The averages have been written: the next pack takes the exponent that aims at top = 9.
  void finishStep() noexcept;

 private:
  int world_size_;
  int log2_world_; ///< L
  int exponent_ = 0; ///< s
  int next_exponent_ = 0;
};

} // namespace pycomm
