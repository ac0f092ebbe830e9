#include "engine/host/host_layout.h"

#include <string>

#include "base/error.h"

namespace pycomm {

std::byte* HostView::inHeap(int of, uint64_t place, size_t nbytes) const {
  if (heaps == nullptr || place == 0) {
    return nullptr;
  }
  const BufferView& heap = heaps[of];
  if (nbytes > heap.nbytes || place - 1 > heap.nbytes - nbytes) {
    ErrorRecord record;
    record.code = ErrorCode::ProtocolViolation;
    record.peer = job == nullptr ? of : job->of(of);
    record.summary = "Rank " + std::to_string(record.peer) + " says that an operand of " + std::to_string(nbytes) +
        " bytes lies at " + std::to_string(place - 1) + " of its heap, which has " + std::to_string(heap.nbytes) +
        " bytes.";
    record.hint = "look for native code that writes out of bounds in that process, or set PYCOMM_TRANSPORT=tcp";
    throw Error(record);
  }
  return heap.ptr + (place - 1);
}

} // namespace pycomm
