#include "transport/rendezvous/failure_readers.h"

#include <poll.h>

#include <algorithm>
#include <exception>

#include "base/deadline.h"
#include "transport/rendezvous/store_round.h"

namespace pycomm {
namespace {

constexpr int kLongestStayMs = 2000;
constexpr int kStaySliceMs = 5;

} // namespace

// Anybody may write that a rank has read it, so this is without a seal: it shortens the wait, and no more.
void FailureReaders::acknowledge(const ErrorRecord& record, bool serves_store) const noexcept {
  try {
    const auto keyOf = [&](const char* what, int reader) { return prefix + what + "/" + std::to_string(reader); };
    store.setUnsealed(keyOf("read", rank), "1");
    const bool all_may_come = record.code != ErrorCode::RendezvousTimeout && record.code != ErrorCode::Aborted;
    const Deadline end = Deadline::after(serves_store ? kLongestStayMs : 0);
    // A rank that finds another world size may be outside this one.
    const int outside = record.code == ErrorCode::ConfigMismatch && job.numbers().empty() ? record.peer + 1 : 0;
    const int readers = std::min(kMaxRanks, std::max(size, outside));
    for (int reader = 0; reader < readers && !end.expired();) {
      if (reader == rank || store.has(keyOf("read", reader)) || !(all_may_come || store.has(keyOf("member", reader)))) {
        ++reader;
      } else {
        (void)::poll(nullptr, 0, end.remainingMs(kStaySliceMs));
      }
    }
  } catch (const std::exception&) { // without the store, or memory, every rank finds out by itself
  }
}

} // namespace pycomm
