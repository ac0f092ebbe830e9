#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/buffer_view.h"
#include "transport/memory/shared_arena.h"

namespace pycomm {

/// Memory of this process that other processes of its host may map: peers read and write tensors in it in place,
/// without intermediate copies.
///
/// It is one sparse memfd of a fixed, sealed size, which reserves only address space; pages exist for allocated blocks.
/// So a peer maps it once, and an offset identifies a tensor.
///
/// Any thread. After fork(), parent and child share the inherited memory; the child frees none of it.
class SharedHeap {
 public:
  /// As large as the machine's memory. Throws what SharedArena::create throws.
  [[nodiscard]] static std::shared_ptr<SharedHeap> create();
  explicit SharedHeap(SharedArena arena);
  /// Destroy it only after the last release().
  ~SharedHeap() = default;
  SharedHeap(const SharedHeap&) = delete;
  SharedHeap& operator=(const SharedHeap&) = delete;

  /// Allocates whole pages, zeroed. Throws Error(NoSharedMemory).
  [[nodiscard]] void* allocate(size_t nbytes);
  void release(void* begin) noexcept;

  /// The offset of a buffer for peers. Nullopt if the buffer is not in this heap, or if it shares a page with other
  /// data: its pages must be removable from peers without touching anything else.
  [[nodiscard]] std::optional<uint64_t> placeOf(const void* buffer, size_t nbytes) const;

  /// Moves the pages of this buffer to new memory and keeps their contents; peers keep the old pages mapped, which exist
  /// until release(). For the few pages that a stopped peer could still write into. Returns false if there is no memory
  /// for the copy. placeOf() never again finds a buffer that has one of these pages.
  bool detach(const void* buffer, size_t nbytes) noexcept;

  /// So many ranks of this host share memory in a group: of all groups the largest number counts. Any thread.
  static void sharedBy(size_t ranks) noexcept;
  /// How many processes may allocate shared memory at the same moment, as far as this one knows.
  [[nodiscard]] static size_t atOnce() noexcept {
    const size_t ranks = g_ranks.load(std::memory_order_relaxed);
    return ranks == 0 ? SharedArena::kMostAtOnce : ranks;
  }

  [[nodiscard]] std::byte* base() const noexcept {
    return arena_.at(0);
  }
  /// The whole heap, as mapped in this process.
  [[nodiscard]] BufferView range() const noexcept {
    return {arena_.at(0), arena_.nbytes()};
  }
  /// What peers map.
  [[nodiscard]] const SharedArena& arena() const noexcept {
    return arena_;
  }

 private:
  struct Block {
    size_t nbytes = 0; ///< the requested size
    size_t room = 0; ///< rounded up to whole pages
    std::vector<std::pair<size_t, size_t>> detached; ///< pages that a stopped peer may write: offsets of begin and end
  };
  using Blocks = std::map<size_t, Block>;

  [[nodiscard]] size_t takeRoom(size_t room);
  void giveRoom(size_t offset, size_t room);
  void freePages(size_t offset, size_t nbytes) noexcept;
  [[nodiscard]] Blocks::const_iterator blockOf(const void* buffer, size_t nbytes) const;

  const SharedArena arena_;
  const int process_;
  std::atomic<size_t> live_{0}; ///< number of blocks, read without the lock
  static inline std::atomic<size_t> g_ranks{0}; ///< see sharedBy(); 0: no group yet
  mutable std::mutex mutex_; ///< guards the members below
  Blocks blocks_; ///< by offset
  std::map<size_t, size_t> free_; ///< offset: length; free ranges are never adjacent
};

} // namespace pycomm
