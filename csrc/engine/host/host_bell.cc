#include "engine/host/host_bell.h"

#include "transport/memory/futex.h"

namespace pycomm {

void HostBell::ringOthers() const noexcept {
  for (int peer = 0; peer < view_.size; ++peer) {
    HostProgress& progress = view_.progress(peer);
    if (peer != view_.rank && (progress.waits_for.load(std::memory_order_seq_cst) >> view_.rank & 1) != 0) {
      progress.bell.fetch_add(1, std::memory_order_seq_cst);
      futexWake(progress.bell);
    }
  }
}

void HostBell::ringSelf() const noexcept {
  HostProgress& progress = view_.progress(view_.rank);
  if (progress.waits_for.load(std::memory_order_seq_cst) != 0) {
    progress.bell.fetch_add(1, std::memory_order_seq_cst);
    futexWake(progress.bell);
  }
}

uint32_t HostBell::expect(uint64_t ranks) const noexcept {
  HostProgress& progress = view_.progress(view_.rank);
  progress.waits_for.store(ranks | hostBit(view_.rank), std::memory_order_seq_cst);
  return progress.bell.load(std::memory_order_seq_cst);
}

void HostBell::sleep(uint32_t rung, std::chrono::microseconds pause) const noexcept {
  futexWait(view_.progress(view_.rank).bell, rung, pause.count());
}

void HostBell::ignore() const noexcept {
  view_.progress(view_.rank).waits_for.store(0, std::memory_order_seq_cst);
}

} // namespace pycomm
