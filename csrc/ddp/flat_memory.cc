#include "ddp/flat_memory.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <sys/mman.h>

#include <string>

#include "base/error.h"
#include "base/log.h"
#include "c10d/shared_tensors.h"

namespace pycomm {
namespace {

constexpr size_t kInPagesFromNbytes = 128 << 10; // as malloc does
constexpr size_t kSharedFromNbytes = 32 << 10; // below, whole pages and a system call each cost more than a copy

} // namespace

at::Tensor FlatMemory::zerosInPages(size_t numel, at::ScalarType dtype) {
  const auto options = at::TensorOptions(at::kCPU).dtype(dtype);
  const auto length = static_cast<int64_t>(numel);
  const size_t nbytes = numel * c10::elementSize(dtype);
  if (nbytes >= kInPagesFromNbytes) {
    void* const pages = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages != MAP_FAILED) {
      return at::from_blob(pages, {length}, [nbytes](void* begin) { munmap(begin, nbytes); }, options);
    }
  }
  return at::zeros({length}, options);
}

at::Tensor FlatMemory::zeros(size_t numel, const at::TensorOptions& options) const {
  return options.device().is_cpu() ? zerosInPages(numel, c10::typeMetaToScalarType(options.dtype()))
                                   : at::zeros({static_cast<int64_t>(numel)}, options);
}

FlatMemory::Flat FlatMemory::zerosToShare(size_t numel, const at::TensorOptions& options) {
  const at::ScalarType dtype = c10::typeMetaToScalarType(options.dtype());
  const size_t nbytes = numel * c10::elementSize(dtype);
  if (reachable_ && options.device().is_cpu() && nbytes >= kSharedFromNbytes) {
    try {
      return {emptyShared({static_cast<int64_t>(numel)}, dtype), true};
    } catch (const Error& error) { // as in a small container: the all-reduce copies it
      log(LogLevel::Warn,
          "a gradient bucket of " + std::to_string(nbytes >> 10) +
              " KiB, and those that are made after it, lie in ordinary memory: " + error.record().summary +
              " They are copied on their way.");
      reachable_ = false; // the next ones would find no room either, and one warning is enough
    }
  }
  return {zeros(numel, options), false};
}

} // namespace pycomm
