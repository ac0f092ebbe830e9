#include "transport/memory/shared_heap.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/fault_point.h"
#include "base/process_limits.h"

namespace pycomm {
namespace {

// Limits the address space of peers: 64 ranks on a host, each of which maps 64 heaps, stay far below the 128 TiB per
// process.
constexpr size_t kMostNbytes = size_t{256} << 30;

size_t pageNbytes() noexcept {
  static const auto nbytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return nbytes;
}

size_t wholePages(size_t nbytes) noexcept {
  const size_t page = pageNbytes();
  return (std::max<size_t>(nbytes, 1) + page - 1) / page * page;
}

} // namespace

std::shared_ptr<SharedHeap> SharedHeap::create() {
  const size_t memory = static_cast<size_t>(::sysconf(_SC_PHYS_PAGES)) * pageNbytes();
  return std::make_shared<SharedHeap>(SharedArena::create(wholePages(std::min(memory, kMostNbytes))));
}

SharedHeap::SharedHeap(SharedArena arena) : arena_(std::move(arena)), process_(::getpid()) {
  // Tensors outlive a fork in both processes: a data loader's worker may read one.
  (void)::madvise(arena_.at(0), arena_.nbytes(), MADV_DOFORK);
  free_[0] = arena_.nbytes();
}

void SharedHeap::sharedBy(size_t ranks) noexcept {
  size_t known = g_ranks.load(std::memory_order_relaxed);
  while (known < ranks && !g_ranks.compare_exchange_weak(known, ranks, std::memory_order_relaxed)) {
  }
}

size_t SharedHeap::takeRoom(size_t room) {
  for (auto range = free_.begin(); range != free_.end(); ++range) { // the first that is long enough
    if (range->second >= room) {
      auto taken = free_.extract(range); // its node has the rest: there may be no memory for another
      const size_t offset = taken.key();
      taken.key() += room;
      taken.mapped() -= room;
      if (taken.mapped() > 0) {
        free_.insert(std::move(taken));
      }
      return offset;
    }
  }
  throw Error(
      ErrorCode::NoSharedMemory,
      "There is no room for " + std::to_string(room >> 10) + " KiB more among the shared tensors of this process.",
      "free some, or use torch.empty for tensors that are not communicated");
}

void SharedHeap::giveRoom(size_t offset, size_t room) {
  const auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == offset + room) {
    room += next->second;
    free_.erase(next);
  }
  const auto after = free_.lower_bound(offset);
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      before->second += room;
      return;
    }
  }
  free_[offset] = room;
}

// The kernel takes long to make or free the pages of a large block. That is done without the lock, which every large
// collective takes in placeOf(): meanwhile the block's room is neither free nor owned.
void* SharedHeap::allocate(size_t nbytes) {
  const size_t room = wholePages(nbytes);
  std::unique_lock<std::mutex> lock(mutex_);
  const size_t offset = takeRoom(room);
  try {
    lock.unlock();
    arena_.commit(offset, room, atOnce());
    lock.lock();
    blocks_[offset] = Block{nbytes, room, {}};
  } catch (...) {
    if (lock.owns_lock()) {
      lock.unlock();
    }
    freePages(offset, room); // those that there was room for
    lock.lock();
    giveRoom(offset, room);
    throw;
  }
  live_.fetch_add(1, std::memory_order_relaxed);
  return arena_.at(offset);
}

void SharedHeap::release(void* begin) noexcept {
  if (::getpid() != process_) {
    return; // the parent still uses it; and its lock may have been held when this process was forked
  }
  const auto offset = static_cast<size_t>(static_cast<std::byte*>(begin) - arena_.at(0));
  std::unique_lock<std::mutex> lock(mutex_);
  const auto found = blocks_.find(offset);
  if (found == blocks_.end()) {
    return;
  }
  Block block = std::move(found->second);
  blocks_.erase(found);
  live_.fetch_sub(1, std::memory_order_relaxed);
  lock.unlock();
  // The pages go back at once: freed tensors must not count against the container's limit.
  freePages(offset, block.room);
  std::sort(block.detached.begin(), block.detached.end());
  for (const auto& [from, to] : block.detached) {
    (void)::mmap(arena_.at(from), to - from, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  }
  lock.lock();
  try {
    // Pages that a stopped peer may still write are never used again: that costs address space, and only after a failure.
    size_t free_from = offset;
    for (const auto& [from, to] : block.detached) {
      if (from > free_from) {
        giveRoom(free_from, from - free_from);
      }
      free_from = std::max(free_from, to);
    }
    if (offset + block.room > free_from) {
      giveRoom(free_from, offset + block.room - free_from);
    }
  } catch (const std::bad_alloc&) { // the room is lost, nothing else
  }
}

void SharedHeap::freePages(size_t offset, size_t nbytes) noexcept {
  (void)::fallocate(
      arena_.fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(nbytes));
}

SharedHeap::Blocks::const_iterator SharedHeap::blockOf(const void* buffer, size_t nbytes) const {
  const auto* at = static_cast<const std::byte*>(buffer);
  if (at < arena_.at(0) || at + nbytes > arena_.at(0) + arena_.nbytes()) {
    return blocks_.end();
  }
  const auto offset = static_cast<size_t>(at - arena_.at(0));
  auto block = blocks_.upper_bound(offset);
  if (block == blocks_.begin()) {
    return blocks_.end();
  }
  --block;
  return offset + nbytes <= block->first + block->second.nbytes ? block : blocks_.end();
}

std::optional<uint64_t> SharedHeap::placeOf(const void* buffer, size_t nbytes) const {
  if (live_.load(std::memory_order_relaxed) == 0 || nbytes == 0) {
    return std::nullopt;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto block = blockOf(buffer, nbytes);
  if (block == blocks_.end()) {
    return std::nullopt;
  }
  const auto begin = static_cast<size_t>(static_cast<const std::byte*>(buffer) - arena_.at(0));
  const size_t end = begin + nbytes;
  const auto& detached = block->second.detached;
  if (std::any_of(detached.begin(), detached.end(), [&](const auto& pages) {
        return pages.first < end && begin < pages.second;
      })) {
    return std::nullopt;
  }
  const bool own_pages =
      begin % pageNbytes() == 0 && (end % pageNbytes() == 0 || end == block->first + block->second.nbytes);
  return own_pages ? std::optional<uint64_t>(begin) : std::nullopt;
}

bool SharedHeap::detach(const void* buffer, size_t nbytes) noexcept {
  const auto offset = static_cast<size_t>(static_cast<const std::byte*>(buffer) - arena_.at(0));
  const size_t from = offset / pageNbytes() * pageNbytes();
  const size_t room = wholePages(offset + nbytes) - from;
  try {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = blockOf(buffer, nbytes);
    if (found == blocks_.end()) {
      return true; // not in this heap, so no peer reaches it
    }
    blocks_.find(found->first)->second.detached.emplace_back(from, from + room);
    if (PYCOMM_FAULT("heap.detach").error_number != 0 || !memoryHeadroom(room).has(room)) {
      return false;
    }
  } catch (const std::bad_alloc&) {
    return false;
  }
  void* begin = arena_.at(from);
  void* fresh = ::mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (fresh == MAP_FAILED) {
    return false;
  }
  // A peer may write meanwhile: of a failed operation the output is undefined.
  std::memcpy(fresh, begin, room);
  if (::mremap(fresh, room, room, MREMAP_MAYMOVE | MREMAP_FIXED, begin) == MAP_FAILED) {
    ::munmap(fresh, room);
    return false;
  }
  return true;
}

} // namespace pycomm
