#include "transport/memory/shared_arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/fault_point.h"
#include "base/process_limits.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U // Linux 6.3, where an administrator may demand it
#endif

namespace pycomm {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

constexpr size_t kPieceNbytes = 512 << 10; // takes the kernel some tenths of a millisecond

[[noreturn]] void throwNoRoom(size_t nbytes, int error_number, const std::string& left) {
  ErrorRecord record = systemError(ErrorCode::NoSharedMemory, "", error_number);
  record.code = ErrorCode::NoSharedMemory;
  record.summary = "There is no room for " + std::to_string(nbytes >> 10) + " KiB of shared memory" +
      (left.empty() ? "." : ": " + left + ".");
  record.hint =
      "give the container or the host more memory (shared memory counts against the limit), or set "
      "PYCOMM_TRANSPORT=tcp";
  throw Error(record);
}

/// Throws unless there is room for `rest` of `nbytes`. All ranks of a host may want the same at the same time, and each may have looked
/// before the others took a piece. So each leaves room for one of every rank, however little it wants itself.
void expect(size_t rest, size_t nbytes, size_t at_once) {
  const size_t wanted = rest + at_once * kPieceNbytes;
  const int injected = PYCOMM_FAULT("arena.room").error_number;
  const MemoryHeadroom headroom = injected == 0 ? memoryHeadroom(wanted) : MemoryHeadroom{0, "a fault point"};
  if (!headroom.has(wanted)) {
    throwNoRoom(nbytes, ENOMEM, headroom.limit + " leaves " + std::to_string(headroom.nbytes >> 10) + " KiB");
  }
}

} // namespace

SharedArena::SharedArena(UniqueFd fd, size_t nbytes) : fd_(std::move(fd)), nbytes_(nbytes) {
  void* mapped = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  if (mapped == MAP_FAILED) {
    throw Error(systemError(ErrorCode::SystemError, "shared memory cannot be mapped", errno));
  }
  base_ = static_cast<std::byte*>(mapped);
  (void)::madvise(base_, nbytes, MADV_DONTFORK); // a child is not a member of the group
  // For a core file the kernel would allocate every page of a sparse mapping, and a heap is as large as the machine's
  // memory.
  (void)::madvise(base_, nbytes, MADV_DONTDUMP);
}

SharedArena::SharedArena(SharedArena&& other) noexcept
    : fd_(std::move(other.fd_)), nbytes_(other.nbytes_), base_(std::exchange(other.base_, nullptr)) {}

SharedArena::~SharedArena() {
  if (base_ != nullptr) {
    ::munmap(base_, nbytes_);
  }
}

SharedArena SharedArena::create(size_t nbytes) {
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  const Fault fault = PYCOMM_FAULT("arena.create");
  UniqueFd fd = UniqueFd::from([&] {
    return fault.error_number != 0 ? failWith(fault.error_number) : ::memfd_create("pycomm", kFlags | MFD_NOEXEC_SEAL);
  });
  if (!fd && errno == EINVAL) {
    fd = UniqueFd::from([&] { return ::memfd_create("pycomm", kFlags); });
  }
  if (!fd) {
    throw Error(systemError(ErrorCode::SystemError, "no shared memory (memfd_create)", errno));
  }
  if (::ftruncate(fd.get(), static_cast<off_t>(nbytes)) != 0) {
    throw Error(systemError(ErrorCode::SystemError, "no shared memory (ftruncate)", errno));
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) {
    throw Error(systemError(ErrorCode::SystemError, "shared memory cannot be sealed", errno));
  }
  return SharedArena(std::move(fd), nbytes);
}

SharedArena SharedArena::attach(UniqueFd fd, std::optional<size_t> nbytes) {
  struct stat status{};
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (::fstat(fd.get(), &status) != 0 || status.st_size <= 0 || seals < 0 || (seals & F_SEAL_SHRINK) == 0 ||
      static_cast<size_t>(status.st_size) != nbytes.value_or(static_cast<size_t>(status.st_size))) {
    throw Error(ErrorCode::ProtocolViolation, "a process of this host passed something else than shared memory");
  }
  return SharedArena(std::move(fd), static_cast<size_t>(status.st_size));
}

void SharedArena::expectRoom(size_t nbytes, size_t at_once) {
  expect(nbytes, nbytes, at_once);
}

void SharedArena::commit(size_t offset, size_t nbytes, size_t at_once) const {
  const size_t end = offset + nbytes;
  while (offset < end) {
    expect(end - offset, nbytes, at_once); // before every piece
    const size_t piece = std::min(kPieceNbytes, end - offset);
    const int injected = PYCOMM_FAULT("arena.commit").error_number;
    const int error_number =
        injected != 0 ? injected : ::posix_fallocate(fd_.get(), static_cast<off_t>(offset), static_cast<off_t>(piece));
    if (error_number == 0) {
      offset += piece;
    } else if (
        error_number != EINTR) { // older kernels take back what an interrupted call has done: a piece, and no more
      throwNoRoom(nbytes, error_number, "");
    }
  }
}

} // namespace pycomm
