#include "ddp/elastic_steps.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/step_place.h"
#include "base/wait_point.h"
#include "c10d/interruptible.h"
#include "c10d/process_engine.h"
#include "c10d/python_errors.h"
#include "c10d/torch_compat.h"
#include "c10d/work.h"

namespace pycomm {
namespace {

/// What a commit round carries, as maxima.
enum CommitWord : size_t {
  kStep,
  kMinusStep,
  kLeaves,
  kDoesNotAdmit,
  kRound,
  kMinusRound,
  kPoints,
  kMinusPoints,
  kCommitWords
};

/// Whether an error of a bucket can be what a death, or the end of an epoch, does to it. All others are the program's, also if a
/// rank dies meanwhile.
bool isOfMembers(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& ours) {
    return ours.record().code == ErrorCode::ShutDown || elastic::Agreement::changesMembers(ours.record().code);
  } catch (const std::exception& other) {
    constexpr std::array kCodes = {
        ErrorCode::PeerDead,
        ErrorCode::PeerUnresponsive,
        ErrorCode::PeerLeft,
        ErrorCode::ConnectionReset,
        ErrorCode::ShutDown, // of a group that the driver has closed, since its epoch is over
    };
    return std::any_of(kCodes.begin(), kCodes.end(), [&](ErrorCode code) { return standsFor(other, code); });
  }
}

} // namespace

ElasticSteps::ElasticSteps(c10::intrusive_ptr<PycommBackend> backend, c10::intrusive_ptr<c10d::ProcessGroup> group)
    : backend_(std::move(backend)), group_(std::move(group)) {
  if (backend_->reconfigurable() == nullptr) {
    throw Error(
        ErrorCode::InvalidArgument, "An elastic group needs one that can be reconfigured.", "pycomm.Reconfigurable()");
  }
  present_.met = backend_->met();
  present_.number = static_cast<uint64_t>(present_.met.instance->uuid());
  present_.members.resize(static_cast<size_t>(present_.met.instance->size()));
  std::iota(present_.members.begin(), present_.members.end(), 0);
}

ElasticSteps::ElasticSteps(
    c10::intrusive_ptr<PycommBackend> backend,
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    const AgreementDriver::Config& config)
    : ElasticSteps(std::move(backend), std::move(group)) {
  driver_ = AgreementDriver::open(*backend_->reconfigurable(), present_.met, config, [&] {
    Group::Call barrier;
    barrier.schedule.kind = Collective::Barrier;
    if (const auto failure = run(barrier, nullptr)) {
      throw Error(*failure);
    }
  });
  backend_->closeFirst(driver_);
  entitle();
}

std::shared_ptr<ElasticSteps> ElasticSteps::join(
    c10::intrusive_ptr<PycommBackend> backend,
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    const std::vector<std::string>& asked,
    const AgreementDriver::Config& config) {
  std::vector<MemberHandle> members;
  for (const std::string& handle : asked) {
    members.push_back(MemberHandle::parse(handle));
  }
  std::shared_ptr<ElasticSteps> joining(new ElasticSteps(std::move(backend), std::move(group)));
  joining->driver_ = AgreementDriver::askToJoin(*joining->backend_->reconfigurable(), members, config);
  joining->backend_->closeFirst(joining->driver_);
  return joining;
}

std::optional<std::string> ElasticSteps::pull() {
  for (;;) {
    beforeWait();
    AgreementDriver::Arrival arrival = driver_->arrive(Deadline::after(Interruptible::kEveryMs));
    if (arrival.state) {
      return std::move(arrival.state->bytes);
    }
    if (arrival.admitted) {
      const Reconfigurable::Met alone = present_.met; // its store has to outlive it
      (void)takeOver(*arrival.admitted);
      came_at_ = driver_->steps();
      alone.group->close();
      return std::nullopt;
    }
    checkSignals();
  }
}

void ElasticSteps::give(std::string_view bytes) {
  beforeWait();
  runInterruptibly(
      "pycomm-give",
      [&] { driver_->give(bytes); },
      [&] {
        ErrorRecord why;
        why.code = ErrorCode::Aborted;
        why.summary = "A signal, such as Ctrl-C, has interrupted the process that gives the members' state.";
        driver_->stopGiving(why);
      });
}

ElasticSteps::~ElasticSteps() {
  if (driver_ == nullptr) {
    return;
  }
  if (!backend_->reconfigurable()->belongsToThisProcess()) {
    // In a child of fork() the threads do not exist for which close() waits.
    (void)new std::shared_ptr<AgreementDriver>(std::move(driver_)); // NOLINT: never freed
    return;
  }
  close();
}

std::optional<ErrorRecord> ElasticSteps::run(Group::Call& call, const std::shared_ptr<void>& memory) const {
  Group& group = *present_.met.group;
  call.deadline = Deadline::after(backend_->timeout().count());
  call.waits = true;
  const std::shared_ptr<Operation> operation = group.start(call);
  operation->onDone([memory] {}); // a signal may end the wait before the operation
  waitFor(group, *operation, std::chrono::milliseconds(0), Deadline::never());
  return operation->error();
}

void ElasticSteps::close() noexcept {
  driver_->close();
}

bool ElasticSteps::takeOver(const AgreementDriver::Epoch& epoch) {
  if (epoch.number == present_.number) {
    return false;
  }
  backend_->takeOver(epoch.met);
  passStepPlace(StepPlace::TakeOver);
  NumbersOfProcessGroup::set(*group_, backend_->getRank(), backend_->getSize());
  came_at_ = epoch.changes.joined == present_.changes.joined ? came_at_ : driver_->steps();
  present_ = epoch;
  entitle();
  return true;
}

void ElasticSteps::entitle() const {
  std::string ranks;
  for (const int member : present_.members) {
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(member);
  }
  present_.met.group->identity().title->set("elastic epoch " + std::to_string(present_.number) + ": " + ranks);
}

bool ElasticSteps::begin(Round round) {
  return takeOver(await(&AgreementDriver::begin, round));
}

bool ElasticSteps::awaitMembers() {
  return takeOver(await(&AgreementDriver::present));
}

size_t ElasticSteps::newcomers() {
  return await(&AgreementDriver::newcomers);
}

template <typename Found, typename... More>
Found ElasticSteps::await(std::optional<Found> (AgreementDriver::*waits)(Deadline, More...), More... more) {
  for (;;) {
    beforeWait();
    if (const auto found = ((*driver_).*waits)(Deadline::after(Interruptible::kEveryMs), more...)) {
      return *found;
    }
    checkSignals();
  }
}

bool ElasticSteps::admit() {
  const bool changed = awaitMembers();
  return (driver_->beginAdmission(present_.number) && end(nullptr) != Outcome::Commit) || changed;
}

StepAgreement::Outcome ElasticSteps::end(const std::exception_ptr& error) {
  if (error != nullptr && !(driver_->isOver(present_) && isOfMembers(error))) {
    std::rethrow_exception(error);
  }
  if (const auto wish = error == nullptr ? driver_->finished(present_.number) : std::nullopt) {
    AgreementDriver::Wish agreed;
    const auto failure = commitRound(*wish, agreed);
    if (!failure && driver_->committed(present_.number, agreed)) {
      return Outcome::Commit;
    }
    if (failure && !elastic::Agreement::changesMembers(failure->code) && !driver_->isOver(present_)) {
      throw Error(
          *failure); // of this rank alone, such as no memory: verdict() would wait for a failure that does not come
    }
  }
  for (;;) {
    beforeWait();
    if (const auto verdict = driver_->verdict(present_.number, Deadline::after(Interruptible::kEveryMs))) {
      if (verdict->counts) {
        return Outcome::CommitLast;
      }
      if (verdict->again) { // else begin() waits for the next members
        (void)takeOver(*verdict->again);
      }
      return Outcome::Redo;
    }
    checkSignals();
  }
}

std::optional<ErrorRecord> ElasticSteps::commitRound(const AgreementDriver::Wish& wish, AgreementDriver::Wish& agreed) {
  const auto kind = static_cast<int64_t>(wish.round);
  const int64_t step = driver_->steps() + 1;
  const int64_t points = joinPoints();
  const auto words = std::make_shared<std::array<int64_t, kCommitWords>>();
  (*words)[kStep] = step;
  (*words)[kMinusStep] = -step;
  (*words)[kLeaves] = wish.leaves ? 1 : 0;
  (*words)[kDoesNotAdmit] = wish.admits ? 0 : 1;
  (*words)[kRound] = kind;
  (*words)[kMinusRound] = -kind;
  (*words)[kPoints] = points;
  (*words)[kMinusPoints] = -points;
  const BufferView bytes(reinterpret_cast<std::byte*>(words->data()), sizeof *words);
  Group::Call call;
  call.schedule.kind = Collective::AllReduce;
  call.schedule.dtype = DType::Int64;
  call.schedule.reduce_op = ReduceOp::Max;
  call.schedule.numel = kCommitWords;
  call.input = bytes;
  call.output = bytes;
  if (auto failure = run(call, words)) {
    return failure;
  }
  if ((*words)[kStep] != step || (*words)[kMinusStep] != -step) {
    throw Error(
        ErrorCode::Internal,
        "The members of an elastic group commit different steps: this rank " + std::to_string(step) + ", others from " +
            std::to_string(-(*words)[kMinusStep]) + " to " + std::to_string((*words)[kStep]) + ".",
        "report it");
  }
  if ((*words)[kRound] != kind || (*words)[kMinusRound] != -kind) {
    throw Error(
        ErrorCode::CollectiveMismatch,
        "The members of an elastic group are at different places of their programs: some end a step, others call mean(), "
        "confirm() or join_point(), or begin a forward pass.",
        "call mean(), confirm(), join_point() and forward passes with gradients at the same places on all members");
  }
  if ((*words)[kPoints] != points || (*words)[kMinusPoints] != -points) {
    throw Error(
        ErrorCode::CollectiveMismatch,
        "The members of an elastic group do not call join_point() at the same step: before this one, number " +
            std::to_string(step) + ", this rank has called it " + std::to_string(points) +
            " times since the last one, and others from " + std::to_string(-(*words)[kMinusPoints]) + " to " +
            std::to_string((*words)[kPoints]) + " times.",
        "call join_point() behind the same steps on all members, as at the end of each epoch");
  }
  agreed.leaves = (*words)[kLeaves] != 0;
  agreed.admits = (*words)[kDoesNotAdmit] == 0;
  return std::nullopt;
}

} // namespace pycomm
