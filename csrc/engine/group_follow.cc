// Operations of a group that another library runs.
#include <utility>

#include "engine/group.h"
#include "engine/report/failure_text.h"
#include "schedule/request_checks.h"

namespace pycomm {

std::shared_ptr<Operation> Group::follow(const Call& call) {
  refuseInChild();
  const ScheduleRequest schedule = ours(call.schedule);
  checkRequest(schedule);
  Operation::Request request;
  request.descriptor = Descriptor::of(schedule, Algorithm::Nccl);
  request.descriptor.tag = call.tag;
  request.deadline = call.deadline;
  request.id = takeOperationId(counter_, identity_.hash);
  auto operation = std::make_shared<Operation>(std::move(request));
  operation->setMark(recorded(*operation));
  operation->mark().running(operation->issuedAt(), 0);
  onLane(&DataPlane::follow, operation, Pace::Soon);
  return operation;
}

void Group::followedEnded(const std::shared_ptr<Operation>& operation, const std::optional<ErrorRecord>& error) {
  planes_.onData([self = shared_from_this(), operation, error](DataPlane& data) {
    data.followedEnded(operation->request().id.id, error);
  });
}

} // namespace pycomm
