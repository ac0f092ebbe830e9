#pragma once

#include <cstddef>
#include <optional>

#include "base/unique_fd.h"

namespace pycomm {

/// Memory that the processes of one host share: a memfd without a name, mapped here for as long as this object lives.
/// It is passed to other processes as a descriptor (unix_peer.h). The kernel frees it when the last process that has
/// it ends.
///
/// Its size is sealed, so that no process can truncate it under another's mapping. Only commit() makes pages exist, so
/// a lack of memory is an error there and not a signal (SIGBUS) at the first touch. A writer commits before it writes.
/// A child of fork() does not inherit the mapping, and a core file does not contain it.
class SharedArena {
 public:
  /// Throws Error(Unsupported) if a sandbox forbids it, SystemError or TooManyFiles.
  [[nodiscard]] static SharedArena create(size_t nbytes);
  /// Maps a descriptor that another process has passed. Throws Error(ProtocolViolation) unless the memfd is sealed, and
  /// of this size if one is given.
  [[nodiscard]] static SharedArena attach(UniqueFd fd, std::optional<size_t> nbytes);

  SharedArena(SharedArena&& other) noexcept;
  SharedArena& operator=(SharedArena&& other) = delete;
  SharedArena(const SharedArena&) = delete;
  SharedArena& operator=(const SharedArena&) = delete;
  ~SharedArena();

  /// Processes of one host that may allocate shared memory at the same moment, where nobody knows how many there are.
  static constexpr size_t kMostAtOnce = 64;
  /// Allocates the pages of a range. Throws Error(NoSharedMemory) if there is no room for them beside a piece for each
  /// of `at_once` processes. Any process, any number of times.
  void commit(size_t offset, size_t nbytes, size_t at_once = kMostAtOnce) const;
  /// Throws what commit() would throw now for so many bytes. Allocates nothing.
  static void expectRoom(size_t nbytes, size_t at_once);

  [[nodiscard]] std::byte* at(size_t offset) const noexcept {
    return base_ + offset;
  }
  [[nodiscard]] size_t nbytes() const noexcept {
    return nbytes_;
  }
  [[nodiscard]] int fd() const noexcept {
    return fd_.get();
  }
  /// Keeps the mapping, but commit() fails from now on.
  void closeFd() noexcept {
    fd_.reset();
  }

 private:
  SharedArena(UniqueFd fd, size_t nbytes);

  UniqueFd fd_;
  size_t nbytes_;
  std::byte* base_ = nullptr;
};

} // namespace pycomm
