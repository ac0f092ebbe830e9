#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/codec.h"
#include "ddp/device_bucket.h"
#include "ddp/wire_scale.h"

namespace pycomm {

/// What all buckets of one reducer have in common.
struct BucketLayout {
  int rank = 0;
  int world_size = 1;
  std::optional<at::ScalarType> wire_dtype; ///< none: the parameters' own
  Codec codec = Codec::None; ///< what a wire of fp32 is encoded as, inside the all-reduce
  bool error_feedback = false; ///< what the codec loses is added to the next step's gradients
  bool grads_are_views = false; ///< .grad points into the bucket
  bool hook_averages = false; ///< a comm hook gets the plain gradients, and what it returns is final
  bool sparse = false; ///< one parameter, whose gradients are sparse COO tensors
  bool reachable = false; ///< the ranks share a host and reach each other's tensors in place: see SharedHeap
  int scale_exponent = 0; ///< the fp16 scale's first, the same on every rank
  std::string cuda_library; ///< the path of libpycomm_cuda.so, for gradients on a CUDA device
};

/// Gradients of one dtype that are reduced together.
///
/// Two flat buffers, either of which may be missing. `home` has the parameters' dtype: it is what .grad points into
/// when gradients are views, and what comm hooks see. `wire` is what the all-reduce gets: home itself, or the cast
/// gradients, followed by one element per rank if the wire is fp16 (see WireScale).
/// Both hold each gradient in the memory order of its parameter, which all ranks share. A sparse gradient has no flat
/// memory: there home is the scaled gradient itself, and only while it is reduced.
///
///     dtype on the wire     pack                          reduce     unpack
///     the parameters' own   home = g / N                  SUM home   .grad = home
///     fp32, bf16            wire = cast(g)                SUM wire   .grad = wire * 1/N
///     fp16                  wire = cast(g * 2^s), e_r     SUM wire   .grad = wire * 2^-s/N, or all once more
///     int8, fp8             as fp32                       SUM wire + l, encoded: l = what that lost here
///     any, comm hook        home = g                      hook       .grad = what the hook returned
///
/// N is the divisor of the step: the ranks that still have data, all of them unless in join().
/// Another kind of wire needs changes in the constructor, packWire(), seal(), settled(), judge(), scaleSlots() and unpackWire(), in
/// packOnDevice(), writeScaleSlot() and unpackOnDevice() for CUDA, and outside in Reducer::awaitAllReduce() and its counters, wireOf() of
/// the bindings and WIRE_DTYPES of the wrapper.
///
/// On a CUDA device the same happens behind the streams that gradients come on, for all slots at once: pack() takes note of
/// the stream, seal() launches one kernel, unpack() another one. What there are no kernels for (float64, complex) is left to
/// torch's own, a slot at a time.
///
/// Not thread-safe; the reducer's mutex guards it.
class Bucket {
 public:
  struct Slot {
    at::Tensor param;
    size_t index = 0; ///< in the reducer's list of parameters
    size_t offset = 0; ///< in elements
    size_t numel = 0;
    std::vector<int64_t> strides; ///< of the gradient in memory
    at::Tensor view; ///< into home, if there is one
  };

  Bucket(const std::vector<at::Tensor>& params, const std::vector<size_t>& indices, const BucketLayout& layout);

  [[nodiscard]] const std::vector<Slot>& slots() const noexcept {
    return slots_;
  }
  /// The flat gradients in the parameters' dtype. Undefined where wire_dtype changes them and .grad is no view, and, if
  /// sparse, outside of a step.
  [[nodiscard]] const at::Tensor& home() const noexcept {
    return home_;
  }
  /// What to all-reduce, by SUM. Complex gradients are seen as pairs of reals.
  [[nodiscard]] at::Tensor wire() const;

  [[nodiscard]] bool onCpu() const noexcept {
    return !device_.has_value();
  }
  [[nodiscard]] bool sparse() const noexcept {
    return layout_.sparse;
  }
  /// The s of the fp16 scale, 0 where there is none.
  [[nodiscard]] int scaleExponent() const noexcept {
    return scale_.has_value() ? scale_->exponent() : 0;
  }
  [[nodiscard]] Codec codec() const noexcept {
    return layout_.sparse ? Codec::None : layout_.codec;
  }
  /// What this rank's bytes have lost and not sent yet, in the order of wire(): undefined without error feedback. The
  /// all-reduce sends and writes it.
  [[nodiscard]] const at::Tensor& lost() const noexcept {
    return lost_;
  }
  /// The part of one slot, in its parameter's shape.
  [[nodiscard]] at::Tensor lostOf(const Slot& slot) const;
  /// Bytes that one all-reduce is handed, as they travel.
  [[nodiscard]] size_t wireNbytes() const;
  /// What the layout said, until there was no room for this bucket.
  [[nodiscard]] bool reachable() const noexcept {
    return layout_.reachable;
  }
  /// Bytes that the other ranks reach in place: of wire(), or 0.
  [[nodiscard]] size_t sharedNbytes() const;
  /// Bytes of the gradients in their own dtype; of a sparse one, those of the step under way.
  [[nodiscard]] size_t gradientNbytes() const;

  void beginStep(int divisor);
  /// A step in which this rank has no data: zeros travel, and no .grad is read or written.
  void beginShadowStep();
  /// Slots that have not been packed in this step.
  [[nodiscard]] size_t pending() const noexcept {
    return pending_;
  }
  /// Takes the gradient of one slot in; a parameter without one counts as zero.
  void pack(size_t slot);
  /// After the last pack(), before the all-reduce.
  void seal();

  enum class Verdict { Good, RepackedAfterOverflow, RepackedAfterUnderflow, NonFinite };
  /// After the all-reduce. The Repacked… ones mean: reduce wire() again, then judge again.
  [[nodiscard]] Verdict judge();
  /// Whether judge() will let the sums be as they are. False also where it would throw.
  [[nodiscard]] bool settled() const;

  /// What a comm hook returned becomes the content of home.
  void takeHookResult(const at::Tensor& result);
  /// Writes the reduced gradients of these slots to their parameters' .grad.
  void unpack(const std::vector<size_t>& slots);
  void finishStep() noexcept;

 private:
  [[nodiscard]] bool cast() const noexcept {
    return wire_.defined();
  }
  void unpackOne(size_t slot);
  void packHome(const Slot& slot);
  void packHomeByTorch(const Slot& slot, const at::Tensor& grad, double factor);
  void packWire(const Slot& slot);
  void packSparse(const Slot& slot);
  void unpackWire(Slot& slot);
  void allocateHome();
  [[nodiscard]] at::Tensor zerosToReduce(size_t numel, const at::TensorOptions& options);
  [[nodiscard]] at::Tensor& gradientOf(Slot& slot) const;
  [[nodiscard]] static bool isPlain(const at::Tensor& grad, const Slot& slot);
  [[nodiscard]] static bool isHome(const at::Tensor& grad, const Slot& slot);
  static void bumpVersion(const at::Tensor& written);

  [[nodiscard]] std::vector<float> scaleSlots() const;
  [[nodiscard]] bool fuses() const noexcept;
  [[nodiscard]] at::ScalarType kernelType() const;
  void sealOnDevice();
  void packOnDevice();
  void writeScaleSlot(const at::Tensor& largest_bits);
  void unpackOnDevice(const std::vector<size_t>& wanted);

  BucketLayout layout_;
  at::ScalarType dtype_;
  std::vector<Slot> slots_;
  size_t numel_ = 0;
  at::Tensor home_;
  at::Tensor wire_; ///< undefined when home is what travels
  std::optional<WireScale> scale_; ///< fp16 wire only
  std::optional<DeviceBucket> device_; ///< gradients on a CUDA device
  at::Tensor lost_; ///< float32, with error feedback only
  uint32_t max_abs_bits_ = 0;
  size_t pending_ = 0;
  int divisor_ = 1;
  bool shadow_ = false;
  bool shared_ = false; ///< wire() lies where the other ranks reach it
};

} // namespace pycomm
