#include "engine/operation/issue_context.h"

#include <utility>

namespace pycomm {
namespace {
thread_local std::shared_ptr<IssueContext> t_context;
} // namespace

const std::shared_ptr<IssueContext>& IssueContext::current() noexcept {
  return t_context;
}

IssueScope::IssueScope(std::shared_ptr<IssueContext> context) noexcept
    : previous_(std::exchange(t_context, std::move(context))) {}

IssueScope::~IssueScope() {
  t_context = std::move(previous_);
}

uint64_t mix64(uint64_t value) noexcept {
  value += 0x9e3779b97f4a7c15ULL;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

OperationId takeOperationId(std::atomic<int64_t>& counter, uint32_t group) noexcept {
  const std::shared_ptr<IssueContext>& context = IssueContext::current();
  if (context == nullptr) {
    const int64_t sequence = counter.fetch_add(1, std::memory_order_relaxed) + 1;
    return {static_cast<uint64_t>(sequence), sequence};
  }
  const uint64_t id = mix64(mix64(context->base() ^ group) + context->takeIndex());
  return {id | kDerivedIdBit, -1};
}

std::shared_ptr<IssueContext> callbackContext(
    const std::shared_ptr<IssueContext>& issuer,
    uint64_t op_id,
    uint32_t group) {
  // A chain runs one operation after another, no matter which thread issues the next one. So its callbacks use the chain's numbers.
  if (issuer != nullptr && issuer->kind() == IssueContext::Kind::Chain) {
    return issuer;
  }
  return std::make_shared<IssueContext>(IssueContext::Kind::Callback, mix64(op_id ^ (uint64_t{group} << 17)));
}

} // namespace pycomm
