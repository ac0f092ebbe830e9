#include "engine/loop/staging_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "base/fault_point.h"

namespace pycomm {
namespace {

constexpr size_t kPageNbytes = 4096;

/// Gives large memory back to the kernel, a little at a time. munmap() alone would hold the lock of the address space for all of it, 70 ms
/// for a GiB, and every thread that allocates would wait for that.
struct DeleteInPieces {
  size_t nbytes;

  void operator()(std::byte* memory) const noexcept {
    constexpr size_t kPiece = 4 << 20;
    size_t offset = -reinterpret_cast<uintptr_t>(memory) % kPageNbytes;
    for (; offset + kPageNbytes <= nbytes; offset += kPiece) {
      const size_t piece = std::min(kPiece, (nbytes - offset) / kPageNbytes * kPageNbytes);
      ::madvise(memory + offset, piece, MADV_DONTNEED);
    }
    delete[] memory;
  }
};

} // namespace

StagingBuffer::StagingBuffer(StagingBuffer&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)),
      memory_(std::move(other.memory_)),
      nbytes_(std::exchange(other.nbytes_, 0)),
      size_class_(other.size_class_) {}

StagingBuffer& StagingBuffer::operator=(StagingBuffer&& other) noexcept {
  if (this != &other) {
    release();
    pool_ = std::exchange(other.pool_, nullptr);
    memory_ = std::move(other.memory_);
    nbytes_ = std::exchange(other.nbytes_, 0);
    size_class_ = other.size_class_;
  }
  return *this;
}

void StagingBuffer::release() noexcept {
  if (memory_ != nullptr && pool_ != nullptr) {
    pool_->taken_nbytes_ -= nbytes_;
    pool_->memory_.giveBack(std::move(memory_), size_class_, nbytes_);
  }
  memory_.reset();
  pool_ = nullptr;
  nbytes_ = 0;
}

StagingBuffer StagingPool::take(size_t nbytes) {
  size_t size_class = 6; // 64 bytes at the least
  while ((size_t{1} << size_class) < nbytes) {
    ++size_class;
  }
  StagingBuffer buffer;
  buffer.size_class_ = size_class;
  buffer.memory_ = memory_.take(size_class, nbytes);
  buffer.pool_ = this; // only now: what throws above has taken nothing
  buffer.nbytes_ = nbytes;
  taken_nbytes_ += nbytes;
  return buffer;
}

std::unique_ptr<std::byte[]> StagingMemory::take(size_t size_class, size_t nbytes) {
  if (free_.size() <= size_class) {
    free_.resize(size_class + 1);
  }
  if (free_[size_class].empty()) {
    PYCOMM_FAULT_POINT("staging.allocate");
    const size_t of_class = size_t{1} << size_class;
    const size_t taken = of_class > keep_nbytes_ ? (nbytes + kPageNbytes - 1) / kPageNbytes * kPageNbytes : of_class;
    // Not zeroed: every byte is written before it is read.
    return std::unique_ptr<std::byte[]>(new std::byte[taken]);
  }
  std::unique_ptr<std::byte[]> memory = std::move(free_[size_class].back());
  free_[size_class].pop_back();
  kept_nbytes_ -= size_t{1} << size_class;
  return memory;
}

void StagingMemory::giveBack(std::unique_ptr<std::byte[]> memory, size_t size_class, size_t nbytes) noexcept {
  const size_t of_class = size_t{1} << size_class;
  try {
    if (kept_nbytes_ + of_class <= keep_nbytes_) {
      free_[size_class].push_back(std::move(memory));
      kept_nbytes_ += of_class;
    } else if (nbytes >= kDiscardNbytes && discard_) {
      discard_(std::shared_ptr<const void>(memory.release(), DeleteInPieces{nbytes}));
    }
  } catch (...) { // no room to remember it: let it go
  }
}

} // namespace pycomm
