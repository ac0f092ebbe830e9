#include "engine/group.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "base/fault_point.h"
#include "engine/report/failure_text.h"

namespace pycomm {

bool Group::servedByHost(const ScheduleRequest& schedule) const noexcept {
  return sharesMemory() && HostPlane::serves(schedule, roster_.identity.size);
}

Usage Group::usage() {
  Usage usage;
  dataLoop().run([&] {
    const DataPlane* const data = planes_.data();
    usage = data == nullptr ? usage : data->usage();
  });
  usage.host_pending = sharesMemory() ? planes().host()->pending() : 0;
  return usage;
}

bool Group::reachesTensors() const noexcept {
  return sharesMemory() && planes_.host()->reachesTensors(); // memory of this process
}

bool Group::keepsParts(const ScheduleRequest& schedule) {
  refuseInChild();
  if (servedByHost(schedule)) {
    return schedule.kind == Collective::AllGather || schedule.kind == Collective::ReduceScatter;
  }
  return issuer_.keepsParts(schedule);
}

void Group::refuseInChild() const {
  if (!engine_.belongsToThisProcess()) {
    ErrorRecord record;
    record.code = ErrorCode::Forked;
    roster_.identity.sign(record);
    record.summary =
        "A process group cannot be used in a child of fork(): its threads and connections belong to the parent.";
    record.hint = "start workers with the spawn method, or make a new process group in the child";
    throw Error(record);
  }
}

std::shared_ptr<Operation> Group::start(const Call& call) {
  try {
    return startChecked(call);
  } catch (const Error& error) {
    ErrorRecord record = errorOf(error.record(), roster_.identity);
    record.op = record.op.empty() ? collectiveName(call.schedule.kind) : record.op;
    throw Error(record);
  }
}

template <typename Body>
auto Group::orFail(const Body& body) {
  try {
    return body();
  } catch (...) {
    const std::exception_ptr thrown = std::current_exception();
    const ErrorRecord why = recordInAnyCase(roster_.identity, [&] { return recordOfThrown(thrown, roster_.identity); });
    if (isOwnTrouble(why.code)) { // else all ranks find it
      abort(why); // a caller may try again at once
    }
    throw;
  }
}

std::shared_ptr<Operation> Group::startChecked(const Call& call) {
  refuseInChild(); // before it takes a number
  if (aborted_.load(std::memory_order_acquire) && !call.held) {
    Call never = call; // it is not released, so no byte of it leaves before the group ends, and it with the group
    never.held = true;
    return startChecked(never);
  }
  PYCOMM_FAULT_POINT("group.start");
  if (servedByHost(call.schedule)) {
    return orFail([&] { return startOnHost(call); });
  }
  return orFail([&] {
    std::shared_ptr<Operation> operation = issuer_.overLinks(call);
    const Collective kind = call.schedule.kind;
    if (call.held) {
      onDataLoop(&DataPlane::hold, operation, RunOn::DataLoopThread);
    } else if (kind == Collective::Send || kind == Collective::Recv) { // torch does not say who waits for it
      onDataLoop(&DataPlane::post, operation, kind == Collective::Send ? RunOn::Caller : RunOn::CallerPatiently);
    } else {
      onDataLoop(&DataPlane::post, operation, call.waits ? RunOn::NextDriver : RunOn::DataLoopThread);
    }
    return operation;
  });
}

std::shared_ptr<Operation> Group::startOnHost(const Call& call) {
  Operation::Request request = issuer_.requestOnHost(call);
  std::shared_ptr<Operation> operation;
  const auto make = [&] { return issuer_.onHost(std::move(request), call.held); };
  if (!planes().host()->post(std::cref(make), call.waits, operation)) {
    onDataLoop(
        &DataPlane::post,
        operation,
        call.waits ? RunOn::NextDriver : RunOn::DataLoopThread); // which knows why it is over
  }
  return operation;
}

std::shared_ptr<Operation> Group::follow(const Call& call) {
  refuseInChild(); // before it takes a number
  return orFail([&] {
    std::shared_ptr<Operation> operation = issuer_.followed(call);
    onDataLoop(&DataPlane::follow, operation, RunOn::DataLoopThread);
    return operation;
  });
}

void Group::followedEnded(
    const std::shared_ptr<Operation>& operation,
    const std::optional<ErrorRecord>& error) noexcept {
  try {
    orFail([&] {
      if (error) {
        planes().onData([self = shared_from_this(), operation, error](DataPlane& data) {
          data.followedEnded(operation->request().id.id, error);
        });
      } else { // so small that a Task needs no memory for it
        planes().onData([self = shared_from_this(), operation](DataPlane& data) {
          data.followedEnded(operation->request().id.id, std::nullopt);
        });
      }
    });
  } catch (...) { // it ends with the group, or is one of the process that this is a child of
  }
}

void Group::release(const std::shared_ptr<Operation>& operation, size_t pieces) {
  if (isAborted() || operation->done()) {
    return; // it ends with the group, or has ended with it, which the engine may not have outlived
  }
  refuseInChild(); // before a piece counts
  if (PieceFlow* const flow = operation->request().extras().pieces.get()) {
    flow->arrive(std::min(pieces, flow->arriving().size()));
  }
  if (operation->shared().ticket != 0) {
    planes().host()->release(*operation);
  } else {
    orFail([&] { onDataLoop(&DataPlane::release, operation, RunOn::DataLoopThread); });
  }
}

void Group::onDataLoop(Planes::DataStep step, const std::shared_ptr<Operation>& operation, RunOn thread) {
  EventLoop& data_loop = this->dataLoop();
  auto begin =
      Loop::owned(planes_, [self = shared_from_this(), step, operation] { self->planes_.run(step, operation); });
  switch (thread) {
    case RunOn::DataLoopThread:
      data_loop.post(std::move(begin));
      return;
    case RunOn::NextDriver:
      data_loop.postQuietly(std::move(begin));
      return;
    case RunOn::Caller:
    case RunOn::CallerPatiently:
      data_loop.postHere(std::move(begin), thread == RunOn::CallerPatiently);
      return;
  }
}

bool Group::poll(const Operation& operation) {
  if (!operation.done()) {
    if (operation.shared().ticket != 0) {
      planes().host()->poll();
    } else {
      dataLoop().poll();
    }
  }
  return operation.done();
}

bool Group::wait(const Operation& operation, Deadline deadline) {
  if (operation.done()) {
    return true;
  }
  if (operation.shared().ticket != 0) {
    if (!planes().host()->drive(operation, deadline)) {
      return operation.wait(deadline);
    }
    return operation.done();
  }
  EventLoop& data_loop = this->dataLoop();
  if (data_loop.drive([&] { return operation.done(); }, deadline)) {
    return operation.done();
  }
  data_loop.nudge();
  return operation.wait(deadline);
}

} // namespace pycomm
