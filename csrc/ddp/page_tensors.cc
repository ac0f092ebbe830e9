#include "ddp/page_tensors.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <sys/mman.h>

namespace pycomm {
namespace {

constexpr size_t kAtLeastNbytes = 128 << 10; // where malloc begins to do the same

} // namespace

at::Tensor zerosInPages(int64_t numel, at::ScalarType dtype) {
  const auto options = at::TensorOptions(at::kCPU).dtype(dtype);
  const size_t nbytes = static_cast<size_t>(numel) * c10::elementSize(dtype);
  if (nbytes >= kAtLeastNbytes) {
    void* const pages = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages != MAP_FAILED) {
      return at::from_blob(pages, {numel}, [nbytes](void* begin) { munmap(begin, nbytes); }, options);
    }
  }
  return at::zeros({numel}, options);
}

} // namespace pycomm
