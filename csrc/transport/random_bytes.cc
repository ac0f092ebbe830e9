#include "transport/random_bytes.h"

#include <sys/random.h>

#include <cerrno>

#include "base/error.h"

namespace pycomm {

void fillRandom(void* into, size_t nbytes) {
  auto* next = static_cast<unsigned char*>(into);
  while (nbytes > 0) {
    const ssize_t got = ::getrandom(next, nbytes, 0);
    if (got < 0 && errno != EINTR) {
      throw Error(systemError(ErrorCode::SystemError, "no random number could be drawn", errno));
    }
    const size_t filled = got < 0 ? 0 : static_cast<size_t>(got);
    next += filled;
    nbytes -= filled;
  }
}

} // namespace pycomm
