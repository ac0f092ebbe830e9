#include "engine/operation/issue_context.h"

#include <algorithm>

#include "base/error.h"
#include "base/fault_point.h"
#include "schedule/step.h"

namespace pycomm {
namespace {

thread_local std::shared_ptr<IssueContext> t_context;

constexpr uint64_t kContinuation = 0x636f6e74ULL;
constexpr uint64_t kCompletion = 0x636f6d706c657465ULL;

struct Field {
  unsigned shift;
  unsigned bits;
  [[nodiscard]] uint64_t most() const noexcept {
    return (uint64_t{1} << bits) - 1;
  }
  [[nodiscard]] uint64_t put(uint64_t value) const noexcept {
    return std::min(value, most()) << shift;
  }
  [[nodiscard]] uint32_t get(uint64_t from) const noexcept {
    return static_cast<uint32_t>((from >> shift) & most());
  }
};
constexpr Field kOf{1, 3};
constexpr Field kKind{4, 4};
constexpr Field kDepth{8, 4};
constexpr Field kNumber{12, 8};
constexpr Field kHook{20, 6};
constexpr Field kGroup{26, 10};
constexpr Field kSequence{36, 28};

/// The greatest number that fits stands for all above it, and must not name one of them.
std::string counted(uint64_t value, const Field& field) {
  return std::to_string(value) + (value < field.most() ? "" : " or later");
}

} // namespace

uint64_t mix64(uint64_t value) noexcept {
  value += 0x9e3779b97f4a7c15ULL;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

StrandName StrandName::then(uint64_t number) const noexcept {
  return {mix64(mix64(anywhere) + number), mix64(mix64(at_home) + number), home};
}

StrandName StrandName::by(const StrandName& other) const noexcept {
  return {mix64(mix64(anywhere) ^ other.anywhere), mix64(mix64(at_home) ^ other.in(home)), home};
}

uint64_t CallbackOrigin::packed() const noexcept {
  return kOf.put(static_cast<uint64_t>(of)) | kKind.put(kind) | kDepth.put(depth) | kNumber.put(number) |
      kHook.put(hook) | kGroup.put(group) | kSequence.put(sequence);
}

CallbackOrigin CallbackOrigin::unpacked(uint64_t bits) noexcept {
  CallbackOrigin origin;
  const uint32_t of = kOf.get(bits);
  origin.of = of <= static_cast<uint32_t>(Of::Part) ? static_cast<Of>(of) : Of::Nothing;
  origin.kind = static_cast<uint8_t>(kKind.get(bits));
  origin.depth = kDepth.get(bits);
  origin.number = kNumber.get(bits);
  origin.hook = kHook.get(bits);
  origin.group = kGroup.get(bits);
  origin.sequence = kSequence.get(bits);
  return origin;
}

std::string CallbackOrigin::text() const {
  const std::string in_group = group == 0 ? "" : " in group " + counted(group, kGroup);
  const std::string call =
      hook == 0 ? "" : "call " + counted(sequence, kSequence) + " of comm hook " + counted(hook, kHook) + in_group;
  const std::string number_text = counted(sequence, kSequence);
  std::string parent;
  switch (of) {
    case Of::Nothing:
      return "issued in a callback";
    case Of::Chain:
      return call.empty() ? "issued by a comm hook" : "issued in " + call;
    case Of::Promise:
      parent = call.empty() ? "futures that the program made" : "futures made in " + call;
      break;
    case Of::Message:
      parent = call.empty() ? "message " + number_text + in_group : "a message of " + call;
      break;
    case Of::Part:
    case Of::Several:
    case Of::Operation: {
      const std::string name = collectiveName(static_cast<Collective>(kind));
      parent = !call.empty() ? name + " of " + call
                             : (sequence == 0 ? "a callback's " + name : name + " #" + number_text) + in_group;
      break;
    }
  }
  if (of == Of::Part) {
    return "issued as a part of " + parent;
  }
  if (of == Of::Several) {
    parent = "futures collected from " + parent + " and others";
  }
  if (depth > 0) {
    parent = "the result, " + counted(depth, kDepth) + " deep, of a callback of " + parent;
  }
  return (number == 0 ? "issued in a callback of " : "issued in callback " + counted(number, kNumber) + " of ") +
      parent;
}

CallbackOrigin CallbackOrigin::ofOperation(const OperationId& id, uint8_t kind) noexcept {
  CallbackOrigin origin;
  origin.of = Of::Operation;
  origin.kind = kind;
  origin.sequence = static_cast<uint32_t>(std::max<int64_t>(id.sequence, 0));
  origin.takeHook(id.origin == 0 ? CallbackOrigin() : unpacked(id.origin));
  return origin;
}

void CallbackOrigin::takeHook(const CallbackOrigin& issuer) noexcept {
  if (issuer.hook != 0) {
    hook = issuer.hook;
    group = issuer.group;
    sequence = issuer.sequence;
  }
}

void Completion::note() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (std::exchange(known_, true)) {
    return;
  }
  thread_ = std::this_thread::get_id();
  if (const std::shared_ptr<IssueContext>& strand = IssueContext::current()) {
    first_of_strand_ = strand->takeIndex(IssueContext::Counted::Promises, 0) == 0;
    ambiguous_ = strand->ambiguous();
    strand_ = strand->name().then(kCompletion);
  }
}

uint32_t IssueContext::takeIndex(Counted what, uint64_t group) {
  PYCOMM_FAULT_POINT("issue.index");
  return next_[{what, group}]++;
}

std::shared_ptr<IssueContext> IssueContext::beginning(const std::shared_ptr<IssueContext>& callback) {
  if (callback->promised_ == nullptr) {
    return callback;
  }
  const Promised& promised = *callback->promised_;
  const auto here = std::this_thread::get_id();
  std::optional<StrandName> strands;
  bool in_place = promised.one_adder && promised.adder == here;
  for (const auto& completion : promised.completions) {
    const std::lock_guard<std::mutex> lock(completion->mutex_);
    in_place = in_place && completion->known_ && !completion->strand_ && completion->thread_ == here;
    if (!completion->known_) { // it follows others, one of which has failed
      callback->ambiguous_ = true;
    } else if (completion->strand_) {
      callback->ambiguous_ = callback->ambiguous_ || completion->ambiguous_ || !completion->first_of_strand_;
      strands = strands ? strands->by(*completion->strand_) : *completion->strand_;
    }
  }
  if (in_place) {
    return nullptr;
  }
  callback->ambiguous_ = callback->ambiguous_ || !strands || !promised.first;
  callback->name_ = strands ? strands->by(callback->name_) : callback->name_;
  return callback;
}

const std::shared_ptr<IssueContext>& IssueContext::current() noexcept {
  return t_context;
}

IssueScope::IssueScope(std::shared_ptr<IssueContext> context) noexcept
    : previous_(std::exchange(t_context, std::move(context))) {}

IssueScope::~IssueScope() {
  t_context = std::move(previous_);
}

OperationId takeOperationId(std::atomic<int64_t>& counter, uint32_t group) {
  const std::shared_ptr<IssueContext>& context = IssueContext::current();
  if (context == nullptr) {
    const int64_t sequence = counter.fetch_add(1, std::memory_order_relaxed) + 1;
    return {static_cast<uint64_t>(sequence), sequence};
  }
  if (context->ambiguous()) {
    throw Error(
        ErrorCode::InvalidArgument,
        "A callback issues a collective, and no other rank can tell which callback this is. Either two threads of this process have added "
        "callbacks to its future, or have asked for futures of messages. Or the program completes its future itself (torch.futures.Future), "
        "and not on the thread that added the callback; nor is it the first callback of the first such future that another callback completes.",
        "add callbacks on one thread, complete futures there or one in each callback, or add the callback to the operation's own future");
  }
  const uint32_t index = context->takeIndex(IssueContext::Counted::Operations, group);
  const uint64_t id = mix64(mix64(context->name().in(group) ^ group) + index);
  return {id | kDerivedIdBit, -1, context->origin().packed()};
}

std::shared_ptr<IssueContext> continuationOf(const OperationId& id, uint32_t group, uint8_t kind) {
  CallbackOrigin origin = CallbackOrigin::ofOperation(id, kind);
  origin.of = CallbackOrigin::Of::Part;
  const uint64_t name = mix64(mix64(id.id ^ (uint64_t{group} << 17)) ^ kContinuation);
  return std::make_shared<IssueContext>(StrandName{name, name, group}, origin);
}

} // namespace pycomm
