#include "ddp/wire_scale.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "base/error.h"

namespace pycomm {
namespace {

constexpr int kTopAim = 9;
constexpr int kTopHighest = 15;
constexpr int kTopLowest = 0;

// 2^s and 2^-s must both be normal fp32 numbers.
constexpr int kExponentLimit = 126;

constexpr int kAllZeroCode = 0;

int ceilLog2(int value) {
  int log = 0;
  while ((int64_t{1} << log) < value) {
    ++log;
  }
  return log;
}

} // namespace

WireScale::WireScale(int world_size, int exponent)
    : world_size_(world_size), log2_world_(ceilLog2(world_size)), exponent_(exponent), next_exponent_(exponent) {}

float WireScale::packFactor() const {
  return std::ldexp(1.0F, exponent_);
}

float WireScale::unpackFactor(int divisor) const {
  return std::ldexp(1.0F, -exponent_) / static_cast<float>(divisor);
}

int WireScale::exponentOf(double ratio) {
  int exponent = 0;
  const double mantissa = std::frexp(ratio, &exponent); // 0.5 to below 1
  return mantissa == 0.5 ? exponent - 1 : exponent;
}

float WireScale::exponentCode(Magnitude magnitude, double ratio) {
  const int flag = magnitude.non_finite ? kNonFinite : 0;
  if (magnitude.max_bits == 0) {
    return static_cast<float>(kAllZeroCode + flag);
  }
  float largest = 0;
  std::memcpy(&largest, &magnitude.max_bits, sizeof largest);
  int exponent = 0;
  (void)std::frexp(largest, &exponent);
  return static_cast<float>(std::clamp(exponent + kBias + exponentOf(ratio), kLowestCode, kHighestCode) + flag);
}

WireScale::Outcome WireScale::judge(const std::vector<float>& slots) {
  int highest = kAllZeroCode;
  bool non_finite = false;
  for (size_t rank = 0; rank < slots.size(); ++rank) {
    const float value = slots[rank];
    const bool flagged = value >= static_cast<float>(kNonFinite); // false for NaN
    const float code = flagged ? value - static_cast<float>(kNonFinite) : value;
    const bool known = code == static_cast<float>(kAllZeroCode) ||
        (code >= static_cast<float>(kLowestCode) && code <= static_cast<float>(kHighestCode) &&
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
  const Outcome accepted = non_finite ? Outcome::NonFinite : Outcome::Good;
  next_exponent_ = exponent_;
  if (highest == kAllZeroCode) {
    return accepted;
  }
  const int sum_exponent = highest - kBias + log2_world_; // E + L
  const int top = sum_exponent + exponent_;
  next_exponent_ = std::clamp(kTopAim - sum_exponent, -kExponentLimit, kExponentLimit);
  if ((top >= kTopLowest && top <= kTopHighest) || next_exponent_ == exponent_) {
    return accepted;
  }
  exponent_ = next_exponent_;
  return Outcome::PackAgain;
}

void WireScale::finishStep() noexcept {
  exponent_ = next_exponent_;
}

} // namespace pycomm
