#include "c10d/named_future.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

namespace pycomm {
namespace {

// What a name may be mixed with, beside the numbers of callbacks.
constexpr uint64_t kResult = 0x726573756c74ULL;
constexpr uint64_t kPromise = 0x70726f6d697365ULL;
constexpr uint64_t kCollected = 0x636f6c6c656374ULL;
constexpr uint64_t kMessage = 0x6d657373616765ULL;
constexpr uint64_t kNative = 0x6e6174697665ULL;

thread_local const IssueContext* t_adding = nullptr; ///< of the callback that this thread is adding to a future
thread_local bool t_in_pool = false; ///< see NamedCallbacksInPool

struct Adding {
  explicit Adding(const IssueContext* context) : before(std::exchange(t_adding, context)) {}
  ~Adding() {
    t_adding = before;
  }
  Adding(const Adding&) = delete;
  Adding& operator=(const Adding&) = delete;
  const IssueContext* const before;
};

std::vector<c10::Stream> currentStreams(const c10::ivalue::Future& future) {
  std::vector<c10::Stream> streams;
  for (const c10::Device& device : future.devices()) {
    streams.push_back(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }
  return streams;
}

} // namespace

void keepIfBroken(c10::ivalue::Future& future) noexcept {
  try {
    for (const c10::Device& device : future.devices()) {
      const c10::DeviceGuard guard(device);
    }
  } catch (const std::exception&) {
    static_cast<void>(c10::intrusive_ptr<c10::ivalue::Future>::reclaim_copy(&future).release());
  }
}

FutureName::FutureName(
    c10::TypePtr value,
    const StrandName& name,
    const CallbackOrigin& origin,
    const StrandTraits& traits,
    Engine* engine,
    bool ambiguous,
    std::vector<std::weak_ptr<FutureName>> parents,
    std::shared_ptr<const Promised> promised)
    : Type(value->kind()),
      value_(std::move(value)),
      name_(name),
      origin_(origin),
      traits_(traits),
      engine_(engine),
      ambiguous_(ambiguous),
      parents_(std::move(parents)),
      promised_(std::move(promised)) {}

void FutureName::noteWaited() noexcept {
  if (!waited_.exchange(true, std::memory_order_relaxed)) {
    for (const auto& parent : parents_) {
      if (const auto living = parent.lock()) {
        living->noteWaited();
      }
    }
  }
}

std::shared_ptr<FutureName> FutureName::of(const c10::ivalue::Future& future) {
  const c10::TypePtr type = future.elementType();
  auto* const name = dynamic_cast<FutureName*>(type.get());
  return name == nullptr ? nullptr : name->shared_from_this();
}

bool FutureName::leavesThread() const noexcept {
  return engine_ != nullptr && engine_->belongsToThisProcess() &&
      (t_in_pool || !waited_.load(std::memory_order_relaxed));
}

std::shared_ptr<IssueContext> FutureName::addCallback() {
  const std::shared_ptr<IssueContext>& adder = IssueContext::current();
  CallbackOrigin origin = origin_;
  bool ambiguous = ambiguous_ || (adder != nullptr && adder->ambiguous());
  {
    const std::lock_guard lock(mutex_);
    ambiguous = ambiguous || (adder == nullptr && !adds_.isThis());
    origin.number = ++added_[adder == nullptr ? 0 : adder->name().anywhere];
  }
  const StrandName name = (adder == nullptr ? name_ : name_.by(adder->name())).then(origin.number);
  if (promised_ == nullptr) {
    return std::make_shared<IssueContext>(name, origin, traits_, ambiguous);
  }
  if (adder != nullptr) {
    origin.takeHook(adder->origin());
  }
  auto promised = std::make_shared<Promised>(*promised_);
  const bool on_promise = promised->adder == std::thread::id();
  const auto here = std::this_thread::get_id();
  promised->one_adder = promised->one_adder && adder == nullptr && (on_promise || promised->adder == here);
  promised->adder = here;
  promised->first = promised->first && (!on_promise || origin.number == 1);
  return std::make_shared<IssueContext>(
      name, origin, on_promise ? IssueContext::currentTraits() : traits_, ambiguous, std::move(promised));
}

std::shared_ptr<IssueContext> FutureName::unnamedCallbacks() const {
  return std::make_shared<IssueContext>(name_.then(kNative), origin_, traits_, ambiguous_);
}

bool FutureName::equals(const c10::Type& rhs) const {
  const auto* const other = dynamic_cast<const FutureName*>(&rhs);
  return *value_ == (other == nullptr ? rhs : *other->value_);
}

WorkName nameOfWork(GroupRole& role, uint32_t group, const OperationId& id, uint64_t place, int type, uint8_t kind) {
  const auto mixed = [type](uint64_t value) { return mix64(mix64(value) + static_cast<uint64_t>(type)); };
  WorkName named;
  named.name = {mixed(mix64(role.hash()) ^ mix64(place)), mixed(id.id ^ (uint64_t{group} << 17)), group};
  named.origin = CallbackOrigin::ofOperation(id, kind);
  if (named.origin.hook == 0) {
    named.origin.group = role.number();
  }
  return named;
}

WorkName nameOfMessage(GroupRole& role, uint8_t kind) {
  const std::shared_ptr<IssueContext>& strand = IssueContext::current();
  const uint64_t group = mix64(role.hash() ^ kMessage);
  GroupRole::Message message{0, false};
  WorkName named;
  if (strand == nullptr) {
    message = role.takeMessage();
  } else {
    message = {strand->takeIndex(IssueContext::Counted::Messages, role.hash()), strand->ambiguous()};
    named.name = strand->name();
  }
  const uint32_t n = message.index;
  named.ambiguous = message.ambiguous;
  named.name = named.name.then(group).then(n);
  named.origin.of = CallbackOrigin::Of::Message;
  named.origin.kind = kind;
  named.origin.sequence = n + 1;
  named.origin.group = role.number();
  if (strand != nullptr) {
    named.origin.takeHook(strand->origin());
  }
  return named;
}

Promise::Promise() : completion_(std::make_shared<Completion>()) {
  CallbackOrigin origin;
  origin.of = CallbackOrigin::Of::Promise;
  auto promised = std::make_shared<Promised>();
  promised->completions = {completion_};
  name_ = std::make_shared<FutureName>(
      c10::NoneType::get(),
      StrandName().then(kPromise),
      origin,
      StrandTraits(),
      nullptr,
      false,
      std::vector<std::weak_ptr<FutureName>>{},
      std::move(promised));
}

c10::TypePtr resultOf(
    const IssueContext& callback,
    const c10::ivalue::Future& future,
    Engine* engine,
    c10::TypePtr value) {
  CallbackOrigin origin = callback.origin();
  ++origin.depth;
  return std::make_shared<FutureName>(
      std::move(value),
      callback.name().then(kResult),
      origin,
      callback.traits(),
      engine,
      callback.ambiguous(),
      std::vector<std::weak_ptr<FutureName>>{FutureName::of(future)},
      callback.promised());
}

c10::TypePtr collected(const std::vector<std::shared_ptr<FutureName>>& parts, c10::TypePtr value) {
  const bool only_promised = std::none_of(
      parts.begin(), parts.end(), [](const auto& part) { return part != nullptr && part->promised() == nullptr; });
  std::optional<StrandName> all;
  std::shared_ptr<Promised> promised;
  CallbackOrigin origin;
  Engine* engine = nullptr;
  bool ambiguous = false;
  std::vector<std::weak_ptr<FutureName>> parents;
  for (const auto& named : parts) {
    if (named == nullptr || (named->promised() != nullptr && !only_promised)) {
      if (all) {
        all = all->then(kCollected);
      }
      continue;
    }
    const std::shared_ptr<IssueContext> callback = named->addCallback();
    parents.push_back(named);
    StrandName name = callback->name();
    if (all) {
      name.home = all->home == name.home ? name.home : 0;
      name.anywhere = mix64(mix64(all->anywhere) ^ name.anywhere);
      name.at_home = mix64(mix64(all->at_home) ^ name.at_home);
    } else {
      origin = callback->origin();
    }
    all = name;
    engine = engine != nullptr ? engine : named->engine();
    ambiguous = ambiguous || callback->ambiguous();
    if (const auto& more = callback->promised(); more != nullptr && promised == nullptr) {
      promised = std::make_shared<Promised>(*more);
    } else if (more != nullptr) {
      for (const auto& completion : more->completions) { // each once, in the order that all ranks have
        if (std::find(promised->completions.begin(), promised->completions.end(), completion) ==
            promised->completions.end()) {
          promised->completions.push_back(completion);
        }
      }
      promised->one_adder = promised->one_adder && more->one_adder;
      promised->first = promised->first && more->first;
    }
  }
  if (!all) {
    return nullptr;
  }
  if (promised == nullptr) {
    origin.of = CallbackOrigin::Of::Several;
  }
  return std::make_shared<FutureName>(
      std::move(value),
      all->then(kCollected),
      origin,
      IssueContext::currentTraits(),
      engine,
      ambiguous,
      std::move(parents),
      std::move(promised));
}

NamedCallbacksInPool::NamedCallbacksInPool() noexcept : before_(std::exchange(t_in_pool, true)) {}

NamedCallbacksInPool::~NamedCallbacksInPool() {
  t_in_pool = before_;
}

void addNamed(
    const c10::intrusive_ptr<c10::ivalue::Future>& future,
    const std::shared_ptr<IssueContext>& context,
    std::function<void()> callback) {
  auto run = [context, callback = std::move(callback)] {
    const IssueScope scope(IssueContext::beginning(context));
    callback();
  };
  const Adding adding(context.get());
  future->addCallback([run, strand = context.get()](c10::ivalue::Future& completed) {
    const std::shared_ptr<FutureName> name = FutureName::of(completed);
    if ((t_in_pool || t_adding == strand) && name != nullptr && name->leavesThread()) {
      try {
        const auto later = [run,
                            streams = currentStreams(completed),
                            future = c10::intrusive_ptr<c10::ivalue::Future>::reclaim_copy(&completed)] {
          {
            const c10::MultiStreamGuard guard(streams);
            run();
          }
          keepIfBroken(*future); // this task may have the last reference
        };
        if (name->engine()->callbacks().submit(later)) {
          return;
        }
      } catch (const std::bad_alloc&) { // then here: what it returns may be waited for without a deadline
      }
    }
    run();
  });
}

} // namespace pycomm
