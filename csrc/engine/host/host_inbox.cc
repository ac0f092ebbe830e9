#include "engine/host/host_inbox.h"

#include <algorithm>
#include <utility>

namespace pycomm {
namespace {

int64_t bytesOf(const Descriptor& descriptor) {
  return descriptor.kind == Collective::Barrier
      ? 0
      : descriptor.numel * static_cast<int64_t>(elementSize(descriptor.dtype));
}

} // namespace

bool HostInbox::post(
    const std::function<std::shared_ptr<Operation>()>& make,
    std::shared_ptr<Operation>& made,
    const std::function<void(Operation&)>& accept,
    const std::function<void()>& failed) {
  const std::lock_guard<std::mutex> lock(mutex_);
  try {
    made = make();
    if (closed_) {
      return false;
    }
    put(made, accept);
  } catch (...) {
    if (!closed_ && failed) {
      failed();
    }
    throw;
  }
  return true;
}

void HostInbox::put(const std::shared_ptr<Operation>& made, const std::function<void(Operation&)>& accept) {
  Operation::Shared& shared = made->makeShared();
  if (accept) {
    accept(*made);
  }
  posted_.push_back(made); // the last that takes memory: a ticket that nobody enters would hold up all that come after
  shared.ticket = ++last_ticket_;
  shared.bytes_total = bytesOf(made->request().descriptor);
  recent_[recent_count_++ % recent_.size()] = made;
  pending_.fetch_add(1, std::memory_order_seq_cst);
  arrived_.store(true, std::memory_order_seq_cst);
}

void HostInbox::take(std::vector<std::shared_ptr<Operation>>& into) {
  const std::lock_guard<std::mutex> lock(mutex_);
  arrived_.store(false, std::memory_order_seq_cst);
  into.swap(posted_);
}

std::vector<std::shared_ptr<Operation>> HostInbox::close() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  return std::exchange(posted_, {});
}

std::vector<std::shared_ptr<Operation>> HostInbox::recent() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<Operation>> operations;
  const uint64_t kept = std::min<uint64_t>(recent_count_, recent_.size());
  for (uint64_t i = recent_count_ - kept; i < recent_count_; ++i) {
    operations.push_back(recent_[i % recent_.size()]);
  }
  return operations;
}

} // namespace pycomm
