#pragma once

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

// Fault injection for tests. A site is named in the code; it does nothing, and leaves nothing in the binary, unless
// PYCOMM_FAULT_POINTS is defined. Sites are in .cc files of the core, so that the build for the fault tests can link
// the ordinary objects of the files that include torch. The one other site, in c10d/work.cc, is for the sanitizers'
// build (tools/seam.py).
//
//   PYCOMM_FAULT_POINT("rendezvous.publish");          // may kill, stop, end or delay the process here, or throw
//
//   const Fault fault = PYCOMM_FAULT("socket.write");     // the same, and may ask the caller for a fault of its own
//   if (fault.error_number != 0) { errno = fault.error_number; … }

namespace pycomm {

/// The fault that the caller of PYCOMM_FAULT simulates.
struct Fault {
  int error_number = 0; ///< fail with this errno instead of calling the kernel
  bool shorten = false; ///< move one byte and no more
  bool flip = false; ///< flip one bit of the bytes that are moved
};

/// True if this build has fault points.
[[nodiscard]] bool faultPointsBuiltIn() noexcept;

/// Arms fault points of this process and disarms earlier ones; "" disarms all. Visits are counted anew. Any thread.
///
/// `spec` is "site:nth:action", several separated by commas. `nth` counts visits of the site from 1; "3+" is the third
/// and every later visit. Actions: kill, stop, exit (without any handler), delay=MILLISECONDS, hold (until the next
/// call of this function, 60 s at most), nomem (throws std::bad_alloc), errno=NAME, short, flip. The last three need a
/// PYCOMM_FAULT site; at a PYCOMM_FAULT_POINT site, errno throws Error(SystemError).
/// Throws Error(InvalidArgument) if the spec does not parse or names no site of this program, Error(Unsupported) if faultPointsBuiltIn() is false.
void armFaultPoints(const std::string& spec);

/// The counts of one armed fault point since it was armed.
struct FaultPointTally {
  std::string point; ///< as passed to armFaultPoints(), "socket.write:3:errno=EPIPE"
  int64_t visits = 0; ///< visits of this site
  int64_t strikes = 0; ///< visits in which the action was taken
};

/// One tally per armed fault point of this process, in the order of the spec. A test reads them to check that its fault
/// was injected. Any thread.
[[nodiscard]] std::vector<FaultPointTally> faultPointTallies();

/// Fails as a system call does: sets errno and returns -1.
inline int failWith(int error_number) noexcept {
  errno = error_number;
  return -1;
}

#ifdef PYCOMM_FAULT_POINTS

/// Visits a PYCOMM_FAULT site. Throws std::bad_alloc.
[[nodiscard]] Fault visitFaultPoint(const char* site);
/// Visits a PYCOMM_FAULT_POINT site. Throws std::bad_alloc, Error(SystemError).
void passFaultPoint(const char* site);
/// Flips the lowest bit of the last byte.
void flipBit(void* bytes, size_t nbytes) noexcept;

/// Remembers the name of a site that this program has.
bool rememberFaultSite(const char* site);
template <size_t N>
struct FaultSiteName {
  consteval FaultSiteName(const char (&name)[N]) { // NOLINT
    std::copy_n(name, N, text);
  }
  char text[N]; // NOLINT
};
/// Of each site there is one, which is initialized when the program starts.
template <FaultSiteName name>
struct FaultSite {
  static inline const bool remembered = rememberFaultSite(name.text);
};

#define PYCOMM_FAULT(site) (static_cast<void>(::pycomm::FaultSite<site>::remembered), ::pycomm::visitFaultPoint(site))
#define PYCOMM_FAULT_POINT(site) \
  (static_cast<void>(::pycomm::FaultSite<site>::remembered), ::pycomm::passFaultPoint(site))

#else

inline void flipBit(void*, size_t) noexcept {}

#define PYCOMM_FAULT(site) (::pycomm::Fault{})
#define PYCOMM_FAULT_POINT(site) static_cast<void>(0)

#endif

} // namespace pycomm
