#include "c10d/shared_tensors.h"

#include <ATen/EmptyTensor.h>

#include <cstring>
#include <memory>

#include "c10d/process_engine.h"

namespace pycomm {
namespace {

struct Block {
  std::shared_ptr<SharedHeap> heap;
  void* begin = nullptr;
};

void freeBlock(void* context) {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  block->heap->release(block->begin);
}

class HeapAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (nbytes == 0) {
      return {nullptr, cpu};
    }
    // Asked for each time: a child of fork() has a heap of its own.
    auto block = std::make_unique<Block>(Block{processEngine().heap()});
    void* begin = block->begin = block->heap->allocate(nbytes);
    return {begin, block.release(), &freeBlock, cpu};
  }
  [[nodiscard]] c10::DeleterFnPtr raw_deleter() const override {
    return nullptr; // a bare pointer does not tell which heap it is of
  }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }
};

} // namespace

c10::Allocator& heapAllocator() {
  static auto* const allocator = new HeapAllocator(); // never destroyed: tensors may outlive static destructors
  return *allocator;
}

at::Tensor emptyShared(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::detail::empty_generic(
      sizes, &heapAllocator(), c10::DispatchKeySet(c10::DispatchKey::CPU), dtype, c10::MemoryFormat::Contiguous);
}

} // namespace pycomm
