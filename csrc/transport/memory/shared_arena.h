#pragma once

#include <cstddef>
#include <optional>

#include "base/unique_fd.h"

namespace pycomm {

/// Memory that the processes of one host share: a memfd without a name, mapped here for as long as this object lives. It is passed to
/// others as a descriptor (unix_passing.h), and gone with the last process that has it.
///
/// Its size is sealed, so that nobody can take pages away from under another's mapping. Pages exist only where commit() has had them
/// made, so that a lack of memory is an error there and not a signal (SIGBUS) at the first touch: a writer commits before it writes.
/// A child of fork() does not inherit the mapping, and a core file holds nothing of it.
class SharedArena {
 public:
  /// Throws Error(Unsupported) where a sandbox forbids it, SystemError or TooManyFiles.
  [[nodiscard]] static SharedArena create(size_t nbytes);
  /// Maps what another process has passed. Throws Error(ProtocolViolation) unless it is sealed, and of this size if one is given.
  [[nodiscard]] static SharedArena attach(UniqueFd fd, std::optional<size_t> nbytes);

  SharedArena(SharedArena&& other) noexcept;
  SharedArena& operator=(SharedArena&& other) = delete;
  SharedArena(const SharedArena&) = delete;
  SharedArena& operator=(const SharedArena&) = delete;
  ~SharedArena();

  /// Makes the pages of a range exist. Throws Error(NoSharedMemory) if there is no room for them. Any process, any number of times.
  void commit(size_t offset, size_t nbytes) const;

  [[nodiscard]] std::byte* at(size_t offset) const noexcept {
    return base_ + offset;
  }
  [[nodiscard]] size_t nbytes() const noexcept {
    return nbytes_;
  }
  [[nodiscard]] int fd() const noexcept {
    return fd_.get();
  }
  /// The mapping stays; nothing can be committed any more.
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
