#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace pycomm {

// What tests/cpp/host_walk has in another form: it compiles this folder with words whose every load and store it can put in any order,
// and with sizes that make that order short. So every word that ranks share is a HostWord.

template <typename T>
using HostWord = std::atomic<T>;

inline constexpr uint64_t kHostSlots = 16; ///< operations that a rank may be ahead of another
inline constexpr size_t kHostInlineNbytes = 8 << 10; ///< what goes in a slot
inline constexpr size_t kHostStageNbytes = 1 << 20; ///< of one round
inline constexpr uint64_t kHostStages = 2; ///< rounds that a rank may be ahead of another

} // namespace pycomm
