#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>

#include "base/buffer_view.h"
#include "base/deadline.h"
#include "transport/memory/shared_arena.h"
#include "transport/memory/shared_heap.h"

namespace pycomm {

// What tests/cpp/host_walk has in another form: it compiles this folder with words whose every load and store it can put in any order,
// and with sizes that make that order short. So every word that orders what ranks do with shared memory is a HostWord, used with sequential
// consistency; a rank may load with less what it alone stores.
//
// A fault point (PYCOMM_FAULT, PYCOMM_FAULT_POINT) stands before all bytes that other ranks may write or read meanwhile, but for those of a slot
// whose ticket was loaded: beside the words, the walk pauses only there. HostScene::touchesBytes knows some of them by name.

template <typename T>
using HostWord = std::atomic<T>;

inline constexpr uint64_t kHostSlots = 16; ///< operations that a rank may be ahead of another
inline constexpr size_t kHostInlineNbytes = 8 << 10; ///< what goes in a slot
inline constexpr size_t kHostStageNbytes = 1 << 20; ///< of one round
inline constexpr uint64_t kHostStages = 2; ///< rounds that a rank may be ahead of another

/// Waits a little for another rank to end a step. kHostPauses of them are some 20 ms: several times what a step takes, also on cores
/// that ranks share, and less than anybody notices when a group fails.
inline void hostPause() noexcept {
  std::this_thread::sleep_for(kRoundTrip);
}
inline constexpr int kHostPauses = 400;
static_assert(kHostPauses * kRoundTrip == std::chrono::milliseconds(20), "docs/errors.md, Limits, names it");

/// Allocates the pages of a rank's stages. Throws what SharedArena::commit() throws.
inline void hostCommit(const SharedArena& arena, size_t begin, size_t nbytes) {
  arena.commit(begin, nbytes, SharedHeap::atOnce());
}
/// Moves a part of a tensor to pages that no peer reaches. Returns false if memory is short.
[[nodiscard]] inline bool hostDetach(SharedHeap& heap, BufferView part) noexcept {
  return heap.detach(part.ptr, part.nbytes);
}

} // namespace pycomm
