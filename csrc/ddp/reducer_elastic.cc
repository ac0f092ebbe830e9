// A step that survives deaths: a transaction, which is committed by all members or summed again by those that are left.
//
//     beginStep(), launchFirst() -> gradients are packed and launched as ever -> agree() { sumAll() [-> redo() -> sumAll()] } -> writeAverages() -> commit()
//
// Redo is packing again. Until writeAverages() .grad is the local gradient, residuals are those of the step before, and the exponents of fp16
// are those in state_. So redo() needs nothing but new buckets: new memory as well, since a member that only seemed dead may write to the old.
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/step_place.h"
#include "base/wait_point.h"
#include "c10d/call_tag.h"
#include "c10d/python_errors.h"
#include "c10d/raising.h"
#include "c10d/without_gil.h"
#include "ddp/reducer.h"

namespace pycomm {

void Reducer::setBuffers(std::vector<at::Tensor> buffers) {
  const Turn turn(*this);
  leader_.setBuffers(std::move(buffers));
}

std::pair<int, std::vector<int>> Reducer::members() {
  const std::lock_guard lock(shown_mutex_);
  return {shown_.rank, shown_.members};
}

bool Reducer::leads() {
  const std::lock_guard lock(shown_mutex_);
  return shown_.leads;
}

void Reducer::askToLeave() const {
  if (agreement_ != nullptr) {
    raising([&] { agreement_->leave(); });
  }
}

bool Reducer::hasLeft() const {
  return agreement_ != nullptr && raising([&] { return agreement_->hasLeft(); });
}

// A pass that reduces begins.
void Reducer::beginStep() {
  waitToBegin(StepAgreement::Round::Step);
  if (std::exchange(must_adopt_, false)) {
    adoptMembers();
  }
}

void Reducer::waitToBegin(StepAgreement::Round round) {
  lost_ = nullptr;
  follows_leaver_ = false;
  const int64_t before = nowNs();
  must_adopt_ = agreement_->begin(round) || must_adopt_;
  stats_.agreeing_ns += nowNs() - before;
}

void Reducer::launchFirst() {
  shareState();
  if (!weights_.has_value()) {
    return;
  }
  try {
    weights_->launch(*group_.get(), group_.device(), options_.wrapper_number);
  } catch (const std::exception& error) {
    lose(error);
  }
}

// In a catch block: the step goes on without its sums if they failed, and the agreement says what becomes of it. All other errors are the
// program's, as those of a signal handler, and are thrown on.
void Reducer::lose(const std::exception& error) {
  if (agreement_ == nullptr || !standsForSome(error)) {
    throw;
  }
  lost_ = std::current_exception();
}

// What a ring of the old members has sent is no part of what the new ones send, and a new group counts from 0.
void Reducer::endEpoch() {
  ReducerStats::Epoch ended{
      static_cast<int>(members_.size()), stats_.wire_nbytes, stats_.gradient_nbytes, group_.codecOverflows()};
  for (const ReducerStats::Epoch& each : stats_.past) {
    ended.wire_nbytes -= each.wire_nbytes;
    ended.gradient_nbytes -= each.gradient_nbytes;
  }
  const auto same = std::find_if(
      stats_.past.begin(), stats_.past.end(), [&](const ReducerStats::Epoch& each) { return each.size == ended.size; });
  if (same == stats_.past.end()) {
    stats_.past.push_back(ended);
    return;
  }
  same->wire_nbytes += ended.wire_nbytes;
  same->gradient_nbytes += ended.gradient_nbytes;
  same->codec_overflows += ended.codec_overflows;
}

// The group has other members, or the same ones in a new epoch.
void Reducer::adoptMembers() {
  endEpoch();
  // The old one lives until nothing of it is left in the buckets.
  const ReducerGroup old = std::exchange(group_, ReducerGroup::withItsBackend(group_.get(), params_));
  reports_.changeRanks(group_.rank(), group_.job());
  const elastic::Changes changes = agreement_->changes();
  stats_.left_ranks = changes.left;
  stats_.lost_ranks = changes.lost;
  stats_.joined_ranks = changes.joined;
  ever_changed_ = ever_changed_ || changes != elastic::Changes(); // the same ones may have met again
  members_ = agreement_->members();
  rank_ = group_.rank();
  ++stats_.epochs;
  stats_.meeting_ns += agreement_->meetingNs();
  // Those who are gone may have been the only ones to use some.
  state_.change([](SharedValues& values) { values.knows_used = false; });
  makeBuckets();
  show();
}

// All gradients have come. Returns once all members have all sums of the step; false if no rank has any weight.
bool Reducer::agree() {
  return orFail(
      [&] { return pipeline_->awaited(); },
      [&] {
        bool any = true;
        transact([&] { any = sumAll(); }, [this] { redo(); }, StepAgreement::Round::Step);
        return any;
      });
}

// Returns when all members have what sum() waits for. After a failure again() comes first, in the group of those who are left.
void Reducer::transact(
    const std::function<void()>& sum,
    const std::function<void()>& again,
    StepAgreement::Round round) {
  const auto end = [this] {
    const int64_t before = nowNs();
    const StepAgreement::Outcome outcome = agreement_->end(lost_);
    stats_.agreeing_ns += nowNs() - before;
    return outcome;
  };
  sum();
  StepAgreement::Outcome outcome = end();
  while (outcome == StepAgreement::Outcome::Redo) {
    const int64_t before = nowNs();
    again();
    sum();
    stats_.redoing_ns += nowNs() - before;
    outcome = end();
  }
  if (lost_ != nullptr) {
    throw Error(ErrorCode::Internal, "A step was committed whose sums this rank does not have.", "report it");
  }
  if (outcome == StepAgreement::Outcome::CommitLast && awaitNext()) {
    must_adopt_ = true;
    follows_leaver_ =
        round == StepAgreement::Round::Step && rank_ != 0 && agreement_->changes().left > stats_.left_ranks;
  }
}

// Nothing of a step changes, buckets included, so the next one adopts members that change here.
at::Tensor Reducer::sumOfMembers(const at::Tensor& values, const std::string& about) {
  return raising([&] {
    const Turn turn(*this);
    throwIfUnfinished();
    TORCH_CHECK(agreement_ != nullptr, "the members of a group are summed over with elastic= only");
    return orFail("a mean over the members was being computed", [&] {
      at::Tensor sums;
      waitToBegin(StepAgreement::Round::BetweenSteps);
      const auto sum = [&] {
        sums = values.clone();
        if (sums.numel() == 0) {
          return;
        }
        std::vector<at::Tensor> tensors{sums};
        const CallTag tag(CallTag::of(about));
        try {
          const auto work = group_.get()->allreduce(tensors);
          beforeWait();
          work->wait();
        } catch (const std::exception& error) {
          lose(error);
        }
      };
      const auto again = [this] {
        lost_ = nullptr;
        must_adopt_ = true;
      };
      transact(sum, again, StepAgreement::Round::BetweenSteps);
      return sums;
    });
  });
}

// Between the passes of a step, where a mean may have made it due or a death has left too few, newcomers wait for the next step: they have none
// of those passes. So they do in a forward pass that backward repeats.
size_t Reducer::awaitNewcomers() {
  return raising([&]() -> size_t {
    const Turn turn(*this);
    if (agreement_ == nullptr || midway() || withinBackward()) {
      return 0;
    }
    throwIfUnfinished();
    return orFail("the members were stopping for a process that joins", [&] {
      const int64_t before = nowNs();
      if (agreement_->admissionIsDue()) {
        must_adopt_ = agreement_->admit() || must_adopt_;
      }
      const size_t waiting = agreement_->newcomers();
      stats_.agreeing_ns += nowNs() - before;
      return waiting;
    });
  });
}

void Reducer::joinPoint() {
  raising([&] {
    const Turn turn(*this);
    if (agreement_ == nullptr) {
      return;
    }
    if (midway()) {
      throw Error(
          ErrorCode::InvalidArgument,
          "join_point() was called between the passes of a step.",
          "call it behind a step, before the next forward pass");
    }
    agreement_->joinPoint();
  });
}

// Passes of this rank wait for a reduction, and all members have made as many. zero_grad() forgets those in no_sync().
bool Reducer::midway() const {
  const auto holds = [this] {
    return std::any_of(params_.begin(), params_.end(), [](const ReducedParam& each) {
      return each.tensor.requires_grad() && each.tensor.grad().defined();
    });
  };
  return state_.now().accumulated > 0 || (weights_.has_value() && weights_->passes() > 0) ||
      (state_.now().has_local && holds());
}

// After the last step of the old members, and before its averages are written: rank 0 is one of those who write them then. The buckets follow
// when the next step begins, and so does what members() says: others may have committed the step without knowing of a death. The next step
// throws again what this does: the present one counts.
bool Reducer::awaitNext() {
  try {
    return agreement_->awaitMembers();
  } catch (const Error&) {
    return false;
  }
}

// Waits for all that the step sums in the present group; for nothing more once something has failed.
bool Reducer::sumAll() {
  const at::NoGradGuard no_grad;
  try {
    if (lost_ == nullptr && pipeline_->allAhead()) {
      if (!packWeighed()) {
        return false;
      }
      launchFull();
    }
    if (lost_ != nullptr) {
      return true;
    }
    std::optional<std::vector<size_t>> order;
    if (ordersBuckets()) {
      order = order_.seen(state_.now().order);
    }
    leader_.launch(group_, order);
    pipeline_->awaitAll();
    if (used_.has_value()) {
      used_->await();
    }
    leader_.await();
    awaitFutures();
  } catch (const std::exception& error) {
    lose(error);
  }
  return true;
}

// This rank alone has failed: the others go on at once, without it.
void Reducer::abandonMembers() const {
  const WithoutGil no_gil; // it waits for threads
  agreement_->close();
}

void Reducer::redo() {
  lost_ = nullptr;
  ++stats_.redone_steps;
  adoptMembers();
  launchFirst();
  for (const Bucket& bucket : buckets_.all()) {
    passStepPlace(StepPlace::Repack);
    for (const Slot& slot : bucket.slots()) {
      pack(slot.index);
    }
  }
  if (!pipeline_->allAhead()) {
    launchFull();
  }
}

// All members have all sums, so from here on the step changes what the program and the next step see.
void Reducer::writeAverages() {
  const at::NoGradGuard no_grad;
  orFail("the averages of a step that all ranks have were being written", [&] {
    pipeline_->writeAll([this](size_t param) { return isUsed(param); });
    if (auto order = leader_.commit()) {
      checkOrder(*order, params_.size());
      state_.next().order = std::move(*order);
      state_.next().agreed = true;
    }
  });
}

} // namespace pycomm
