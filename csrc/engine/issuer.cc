#include "engine/issuer.h"

#include <utility>

#include "engine/data/point_to_point.h"
#include "engine/host/host_transfer.h"
#include "engine/operation/issue_context.h"
#include "schedule/make_schedule.h"
#include "schedule/select.h"

namespace pycomm {
namespace {

bool hasExtras(const Call& call) {
  return call.schedule.codec != Codec::None || !call.input_parts.empty() || !call.output_parts.empty() ||
      call.schedule.reduce_op == ReduceOp::PremulSum || call.residual.ptr != nullptr || call.input_encoded ||
      call.output_encoded;
}

} // namespace

OperationId Issuer::takeId() {
  return takeOperationId(counter_, roster_.identity.hash);
}

// The algorithm is chosen later.
Operation::Request Issuer::requestOf(const Call& call) const {
  Operation::Request request;
  request.descriptor = Descriptor::of(call.schedule, call.schedule.algorithm);
  request.descriptor.tag = call.tag;
  request.input = call.input;
  request.output = call.output;
  request.deadline = call.deadline;
  if (hasExtras(call)) {
    Operation::Request::Extras& extras = request.extras();
    extras.codec_counters = call.schedule.codec == Codec::None ? nullptr : codec_counters_;
    extras.input_parts = call.input_parts;
    extras.output_parts = call.output_parts;
    extras.premul_factor = call.premul_factor;
    extras.residual = call.residual;
    extras.input_encoded = call.input_encoded;
    extras.output_encoded = call.output_encoded;
  }
  return request;
}

std::shared_ptr<Operation> Issuer::recorded(Operation::Request request) const {
  auto operation = std::make_shared<Operation>(std::move(request));
  const Operation::Request& made = operation->request();
  Descriptor descriptor = made.descriptor;
  if (descriptor.kind == Collective::Send) { // its number is chosen later
    descriptor.kind = made.receives ? Collective::Recv : Collective::Send;
    descriptor.root = made.peer;
    descriptor.digest = 0;
  }
  operation->setMark(FlightLog::issued(log_, made.id, descriptor, operation->issuedAt()));
  return operation;
}

std::shared_ptr<Operation> Issuer::overLinks(const Call& call) {
  Operation::Request request = requestOf(call);
  if (call.schedule.kind == Collective::Send || call.schedule.kind == Collective::Recv) {
    fillMessage(request, call);
  } else {
    fillCollective(request, call);
  }
  return recorded(std::move(request));
}

void Issuer::fillCollective(Operation::Request& request, const Call& call) {
  request.schedule = schedules_.get(schedules_.ours(call.schedule));
  request.descriptor.algorithm = request.schedule->schedule.algorithm;
  request.id = takeId();
  if (call.held && call.in_pieces) {
    PieceFlow::Operand input{call.input.nbytes, PieceFlow::kPlain};
    PieceFlow::Operand output{call.output.nbytes, PieceFlow::kPlain};
    input.encoded_part = call.input_encoded ? call.schedule.numel : PieceFlow::kPlain;
    output.encoded_part = call.output_encoded ? call.schedule.numel : PieceFlow::kPlain;
    request.extras().pieces =
        PieceFlow::ofSchedule(*request.schedule, input, output, call.input.ptr == call.output.ptr);
  }
}

// Messages are named on the data loop, in the order in which it sees them: they take no number from the group's counter, as not all ranks
// take part.
void Issuer::fillMessage(Operation::Request& request, const Call& call) {
  request.receives = call.schedule.kind == Collective::Recv;
  request.peer = call.peer;
  request.descriptor.kind = Collective::Send;
  request.descriptor.algorithm = Algorithm::Direct;
  if (request.receives && call.peer == PointToPoint::kAnyRank) {
    return;
  }
  ScheduleRequest schedule = schedules_.ours(call.schedule);
  schedule.root = call.peer;
  schedule.segment_nbytes = ScheduleRequest().segment_nbytes; // both sides must cut alike, whatever their options
  request.schedule = schedules_.get(schedule);
}

Operation::Request Issuer::requestOnHost(const Call& call) {
  Operation::Request request = requestOf(call);
  checkRequest(schedules_.ours(call.schedule));
  request.descriptor.algorithm = Algorithm::SharedMemory;
  if (call.held && call.in_pieces) {
    request.extras().pieces = HostTransfer::piecesOf(request.descriptor, static_cast<int>(roster_.localRanks().size()));
  }
  return request;
}

std::shared_ptr<Operation> Issuer::onHost(Operation::Request request, bool held) {
  request.id = takeId();
  auto operation = recorded(std::move(request));
  operation->makeShared().held.store(held, std::memory_order_relaxed);
  return operation;
}

std::shared_ptr<Operation> Issuer::followed(const Call& call) {
  const ScheduleRequest schedule = schedules_.ours(call.schedule);
  checkRequest(schedule);
  Operation::Request request;
  request.descriptor = Descriptor::of(schedule, Algorithm::Nccl);
  request.descriptor.tag = call.tag;
  request.deadline = call.deadline;
  request.id = takeId();
  auto operation = recorded(std::move(request));
  operation->mark().running(operation->issuedAt(), 0);
  return operation;
}

bool Issuer::keepsParts(const ScheduleRequest& schedule) {
  return pycomm::keepsParts(schedule.kind, algorithmOf(schedules_.ours(schedule)));
}

} // namespace pycomm
