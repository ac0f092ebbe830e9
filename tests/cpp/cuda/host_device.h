#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "cuda/bucket_kernel.h"
#include "cuda/codec_kernel.h"
#include "cuda/dispatch.h"
#include "cuda/reduce_kernel.h"
#include "device/device_runtime.h"

namespace pycomm::cuda::testing {

inline Stream const kCaller = reinterpret_cast<Stream>(0xca); ///< the caller's stream; only compared

/// A device that is host memory: what goes onto a stream has happened when the call returns. Kernels are the very
/// functions that the device runs, called for each of `threads` threads in turn.
class HostDevice : public DeviceRuntime {
 public:
  explicit HostDevice(uint32_t threads = 32) : threads_(threads) {}

  void setDevice(int) override {}
  void checkDevice() override {}
  std::string deviceUuid(int device) override {
    return "host" + std::to_string(device);
  }
  void* allocatePinned(size_t nbytes) override {
    return std::malloc(nbytes);
  }
  void freePinned(void* ptr) noexcept override {
    std::free(ptr);
  }
  void* allocateDevice(size_t nbytes) override {
    return std::malloc(nbytes);
  }
  void freeDevice(void* ptr) noexcept override {
    std::free(ptr);
  }
  void copy(void* dst, const void* src, size_t nbytes, Stream) override {
    std::memmove(dst, src, nbytes);
  }
  Event createEvent() override {
    return new char;
  }
  void destroyEvent(Event event) noexcept override {
    delete static_cast<char*>(event);
  }
  void record(Event, Stream) override {}
  void streamWait(Stream, Event) override {}
  Stream createStream() override {
    return this;
  }
  void destroyStream(Stream) noexcept override {}
  void whenReached(Stream, Reached reached, void* context) override {
    reached(context, nullptr);
  }
  bool isCapturing(Stream) override {
    return false;
  }
  bool pack(DType grad, DType wire, const BucketArgs& args, Stream) override {
    ++launches;
    return withCast(grad, wire, [&](auto pair) {
      using Pair = decltype(pair);
      for (uint32_t thread = 0; thread < threads_; ++thread) {
        Packer<typename Pair::GradElement, typename Pair::WireElement> packer{args.factor};
        for (uint64_t tile = 0; tile < tileCount(args.numel); ++tile) {
          packTile(args, tile, thread, threads_, packer);
        }
        if (args.stats != nullptr) {
          args.stats->overflows += packer.overflows;
          args.stats->max_abs_bits = std::max(args.stats->max_abs_bits, packer.max_abs_bits);
          args.stats->non_finite |= packer.non_finite;
        }
      }
    });
  }
  bool unpack(DType grad, DType wire, const BucketArgs& args, Stream) override {
    ++launches;
    return withCast(grad, wire, [&](auto pair) {
      using Pair = decltype(pair);
      for (uint32_t thread = 0; thread < threads_; ++thread) {
        for (uint64_t tile = 0; tile < tileCount(args.numel); ++tile) {
          unpackTile<typename Pair::GradElement, typename Pair::WireElement>(args, tile, thread, threads_);
        }
      }
    });
  }
  void writeExponent(const ExponentArgs& args, Stream) override {
    ++launches;
    for (uint32_t thread = 0; thread < threads_; ++thread) {
      writeExponentShare(args, thread, threads_);
    }
  }
  bool hasReduce(DType dtype, ReduceOp op) override {
    return hasReduceKernel(dtype, op);
  }
  void reduce(DType dtype, ReduceOp op, const ReduceArgs& args, Stream) override {
    ++launches;
    withFold(dtype, op, [&](auto fold) {
      using Chosen = decltype(fold);
      ReduceArgs split = args;
      splitForVectors(split, sizeof(typename Chosen::ElementType::Stored));
      for (uint32_t thread = 0; thread < threads_; ++thread) {
        reduceShare<typename Chosen::ElementType, typename Chosen::OpType>(split, thread, threads_);
      }
    });
  }
  void encode(const CodecArgs& args, Stream) override {
    ++launches;
    for (uint64_t block = 0; block < blocksOfPart(args.numel) * args.parts; ++block) {
      const CodecBlock at = blockAt(args, block);
      BlockSummary summary;
      for (uint32_t thread = 0; thread < threads_; ++thread) {
        const BlockSummary share = summarizeShare(args.values + at.value, at.count, thread, threads_);
        summary.max_bits = std::max(summary.max_bits, share.max_bits);
      }
      for (uint32_t thread = 0; thread < threads_; ++thread) {
        const uint32_t overflows = encodeShare(
            args.codec, args.encoded + at.byte, args.values + at.value, at.count, summary, thread, threads_);
        if (args.overflows != nullptr) {
          *args.overflows += overflows;
        }
      }
    }
  }
  void decode(const CodecArgs& args, Stream) override {
    ++launches;
    for (uint64_t block = 0; block < blocksOfPart(args.numel) * args.parts; ++block) {
      const CodecBlock at = blockAt(args, block);
      for (uint32_t thread = 0; thread < threads_; ++thread) {
        decodeShare(args.codec, args.values + at.value, args.encoded + at.byte, at.count, thread, threads_);
      }
    }
  }

  int launches = 0;

 private:
  const uint32_t threads_;
};

} // namespace pycomm::cuda::testing
