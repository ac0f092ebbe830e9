#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

// Where tests make things go wrong. A site is named in the code and does nothing, and leaves nothing in the binary, unless
// PYCOMM_FAULT_POINTS is defined. Sites are in .cc files of the core, so that the build for the fault tests can link the
// ordinary objects of what includes torch. The one site elsewhere, in c10d/work.cc, is for the sanitizers' build (tools/seam.py).
//
//   PYCOMM_FAULT_POINT("rendezvous.publish");          // may kill, stop, end or delay the process here, or throw
//
//   const Fault fault = PYCOMM_FAULT("tcp.write");     // the same, and may ask the caller for a fault of its own
//   if (fault.error_number != 0) { errno = fault.error_number; … }

namespace pycomm {

/// What the caller of PYCOMM_FAULT is asked to do.
struct Fault {
  int error_number = 0; ///< fail with this errno instead of calling the kernel
  bool shorten = false; ///< move one byte and no more
  bool flip = false; ///< flip one bit of what is moved
};

/// Whether this build has fault points.
[[nodiscard]] bool faultPointsBuiltIn() noexcept;

/// Arms fault points of this process, in the place of those armed before; "" disarms all. Counting starts anew.
/// Any thread.
///
/// `spec` is "site:nth:action", several separated by commas. `nth` counts visits of the site from 1; "3+" is the third and
/// every later one. Actions: kill, stop, exit (without any handler), delay=MILLISECONDS, nomem (throws std::bad_alloc),
/// errno=NAME, short, flip. The last three need a site that can: elsewhere errno throws Error(SystemError).
/// Throws Error(InvalidArgument) for a spec that cannot be read, Error(Unsupported) where faultPointsBuiltIn() is false.
void armFaultPoints(const std::string& spec);

/// What became of one armed fault point since it was armed.
struct FaultPointTally {
  std::string point; ///< as armFaultPoints() was given it, "tcp.write:3:errno=EPIPE"
  int64_t visits = 0; ///< of its site
  int64_t strikes = 0; ///< how often its action was taken
};

/// Of every armed fault point of this process, in the order of the spec; none if none is armed. A test asks for them to
/// know that its fault struck. Any thread.
[[nodiscard]] std::vector<FaultPointTally> faultPointTallies();

/// What a failed system call leaves: errno, and -1.
inline int failWith(int error_number) noexcept {
  errno = error_number;
  return -1;
}

#ifdef PYCOMM_FAULT_POINTS

/// A visit of a site of the kind that may answer. Throws std::bad_alloc.
[[nodiscard]] Fault visitFaultPoint(const char* site);
/// A visit of a site without an answer. Throws std::bad_alloc, Error(SystemError).
void passFaultPoint(const char* site);
/// Flips the lowest bit of the last byte.
void flipBit(void* bytes, size_t nbytes) noexcept;

#define PYCOMM_FAULT(site) (::pycomm::visitFaultPoint(site))
#define PYCOMM_FAULT_POINT(site) ::pycomm::passFaultPoint(site)

#else

inline void flipBit(void*, size_t) noexcept {}

#define PYCOMM_FAULT(site) (::pycomm::Fault{})
#define PYCOMM_FAULT_POINT(site) static_cast<void>(0)

#endif

} // namespace pycomm
