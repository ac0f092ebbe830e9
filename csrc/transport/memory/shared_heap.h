#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/buffer_view.h"
#include "transport/memory/shared_arena.h"

namespace pycomm {

/// Memory of this process that processes on its host may map: tensors that lie here are read and written by peers in place, without
/// copies in between.
///
/// One sparse memfd of a fixed, sealed size, which costs address space alone; pages exist for what is allocated. So a peer maps it once,
/// and an offset is all that it needs to be told of a tensor.
///
/// Any thread. A child of fork() shares what it inherits with its parent, and frees nothing of it.
class SharedHeap {
 public:
  /// Room for as much as the machine has memory. Throws what SharedArena::create throws.
  [[nodiscard]] static std::shared_ptr<SharedHeap> create();
  explicit SharedHeap(SharedArena arena);
  /// After the last release().
  ~SharedHeap() = default;
  SharedHeap(const SharedHeap&) = delete;
  SharedHeap& operator=(const SharedHeap&) = delete;

  /// Whole pages, zeroed. Throws Error(NoSharedMemory).
  [[nodiscard]] void* allocate(size_t nbytes);
  void release(void* begin) noexcept;

  /// Where peers find a buffer: nothing unless it lies here and shares no page with other data, so that its pages can be taken away from
  /// peers without touching anything else.
  [[nodiscard]] std::optional<uint64_t> placeOf(const void* buffer, size_t nbytes) const;

  /// Gives the buffer pages of its own, with what is in them; what peers have mapped is another memory from then on. For a buffer that a
  /// silent peer could write into later. False if there is no memory for it. Nothing of its allocation is found by placeOf() again.
  bool detach(const void* buffer, size_t nbytes) noexcept;

  [[nodiscard]] std::byte* base() const noexcept {
    return arena_.at(0);
  }
  /// All of it, as this process has it mapped.
  [[nodiscard]] BufferView range() const noexcept {
    return {arena_.at(0), arena_.nbytes()};
  }
  [[nodiscard]] int fd() const noexcept {
    return arena_.fd();
  }

 private:
  struct Block {
    size_t nbytes = 0; ///< as asked for
    size_t room = 0; ///< whole pages
    bool detached = false;
  };
  using Blocks = std::map<size_t, Block>;

  [[nodiscard]] size_t takeRoom(size_t room);
  void giveRoom(size_t offset, size_t room);
  [[nodiscard]] Blocks::const_iterator blockOf(const void* buffer, size_t nbytes) const;

  const SharedArena arena_;
  const int process_;
  std::atomic<size_t> live_{0}; ///< blocks, read without the lock
  mutable std::mutex mutex_; ///< guards the rest
  Blocks blocks_; ///< by offset
  std::map<size_t, size_t> free_; ///< offset: length, never adjacent
};

} // namespace pycomm
