#include "engine/data/transfer.h"

#include <algorithm>
#include <string>
#include <utility>

namespace pycomm {
namespace {

const Edge* findEdge(const std::vector<Edge>& edges, int peer, size_t& index) {
  for (index = 0; index < edges.size(); ++index) {
    if (edges[index].peer == peer) {
      return &edges[index];
    }
  }
  return nullptr;
}

} // namespace

Transfer::Transfer(
    std::shared_ptr<Operation> operation,
    const GroupIdentity& identity,
    Protocol& protocol,
    StagingPool& staging,
    SendFrame send_frame,
    Working& working)
    : operation_(std::move(operation)),
      prepared_(*operation_->request().schedule),
      identity_(identity),
      protocol_(protocol),
      staging_(staging),
      send_frame_(std::move(send_frame)),
      pieces_(operation_->request().extras().pieces.get()),
      local_(*operation_, identity.size, staging),
      states_(prepared_.schedule.steps.size()),
      next_incoming_(prepared_.incoming.size(), 0),
      leaving_(prepared_.outgoing.size()),
      working_(working),
      steps_left_(prepared_.schedule.steps.size()) {
  const Schedule& schedule = prepared_.schedule;
  for (size_t i = 0; i < states_.size(); ++i) {
    states_[i].deps_left = schedule.steps[i].deps_end - schedule.steps[i].deps_begin;
  }
  if (pieces_ == nullptr) {
    return;
  }
  const size_t arrived = pieces_->arrived();
  for (uint32_t i = 0; i < states_.size(); ++i) {
    if (pieces_->neededBy(i) > arrived) {
      ++states_[i].deps_left; // its input is one more thing that it depends on
      without_input_.push_back(i);
    }
  }
  std::sort(without_input_.begin(), without_input_.end(), [&](uint32_t a, uint32_t b) {
    return std::pair(pieces_->neededBy(a), a) > std::pair(pieces_->neededBy(b), b);
  });
}

void Transfer::start() {
  for (uint32_t i = 0; i < states_.size(); ++i) {
    if (states_[i].deps_left == 0) {
      becomeReady(i);
    }
  }
  runReady();
}

void Transfer::inputArrived() {
  const size_t arrived = pieces_ == nullptr ? 0 : pieces_->arrived();
  while (!without_input_.empty() && pieces_->neededBy(without_input_.back()) <= arrived) {
    const uint32_t step = without_input_.back();
    without_input_.pop_back();
    if (--states_[step].deps_left == 0) {
      becomeReady(step);
    }
  }
  runReady();
}

void Transfer::becomeReady(uint32_t step) {
  if (prepared_.incoming_of_step[step] >= 0 && !states_[step].arrived) {
    return;
  }
  if (local_.valuesOf(prepared_.schedule.steps[step], arriving(step)) == 0) {
    ready_.push_back(step);
    return;
  }
  work_.push_back(step);
  if (work_.size() == 1) {
    working_.push_back(this);
  }
}

size_t Transfer::work(size_t nbytes) {
  const uint32_t index = work_.front();
  const Step& step = prepared_.schedule.steps[index];
  const size_t values = local_.valuesOf(step, arriving(index));
  const auto [slice, touched] = local_.sliceOf(step, values, worked_, nbytes);
  local_.run(step, slice, arriving(index));
  worked_ += slice.numel;
  if (worked_ == values) {
    worked_ = 0;
    work_.pop_front();
  }
  if (!work_.empty()) {
    working_.push_back(this);
  }
  if (worked_ == 0) {
    computed(index);
    runReady();
  }
  return touched;
}

void Transfer::runReady() {
  while (!ready_.empty()) {
    const uint32_t step = ready_.front();
    ready_.pop_front();
    execute(step);
  }
}

ErrorRecord Transfer::refused(ErrorCode code, int peer, std::string summary, std::string hint) const {
  ErrorRecord record;
  record.code = code;
  identity_.blame(record, peer);
  record.op = operation_->name();
  record.sequence = operation_->request().id.sequence;
  record.dtype = dtypeName(operation_->request().descriptor.dtype);
  record.numel = operation_->request().descriptor.numel;
  record.phase = ErrorPhase::Matching;
  record.summary = std::move(summary);
  record.hint = std::move(hint);
  return record;
}

uint32_t Transfer::dueStep(int peer, const FrameHeader& header) const {
  size_t edge_index = 0;
  const Edge* edge = findEdge(prepared_.incoming, peer, edge_index);
  const size_t next = edge == nullptr ? 0 : next_incoming_[edge_index];
  if (edge == nullptr || next >= edge->steps.size() || header.index != next) {
    throw Error(refused(
        ErrorCode::ProtocolViolation,
        peer,
        identity_.rankTitle(peer) + " sent a frame of " + operation_->label(identity_.job) + " that is not due.",
        "check that all ranks run the same build of pycomm; otherwise report this as a bug"));
  }
  const uint32_t index = edge->steps[next];
  const size_t nbytes = prepared_.frameNbytes(prepared_.schedule.steps[index]);
  // The descriptors are equal: what can differ are the sizes of parts, of which a descriptor says nothing.
  if (header.payload_nbytes != nbytes) {
    throw Error(refused(
        ErrorCode::CollectiveMismatch,
        peer,
        "The ranks disagree about the size of a part in " + operation_->label(identity_.job) + ": " +
            identity_.job.text(peer) + " sends " + std::to_string(header.payload_nbytes) +
            " bytes where this rank expects " + std::to_string(nbytes) + ".",
        "give both sides of every part the same shape and dtype"));
  }
  return index;
}

void Transfer::expect(int peer, const FrameHeader& header) const {
  static_cast<void>(dueStep(peer, header));
}

Sink Transfer::place(int peer, const FrameHeader& header) {
  const uint32_t index = dueStep(peer, header);
  const Step& step = prepared_.schedule.steps[index];
  const bool straight = step.kind == StepKind::Recv || step.kind == StepKind::RecvCopySend;
  Sink sink;
  if (straight && states_[index].deps_left == 0) {
    sink.into = local_.view(step.dst);
  } else if (header.payload_nbytes > 0) {
    sink.staging = staging_.take(header.payload_nbytes);
    sink.into = sink.staging.view();
  }
  return sink;
}

void Transfer::arrived(int peer, const FrameHeader& header, Sink sink) {
  size_t edge_index = 0;
  const Edge* edge = findEdge(prepared_.incoming, peer, edge_index);
  const uint32_t index = edge->steps[next_incoming_[edge_index]++];
  StepState& state = states_[index];
  state.arrived = true;
  state.eager = (header.aux & kEagerFlag) != 0;
  state.staging = std::move(sink.staging);
  bytes_arrived_ += header.payload_nbytes;
  if (state.deps_left > 0) {
    return;
  }
  if (sink.unexpected) {
    becomeReady(index);
  } else {
    ready_.push_back(index);
  }
  runReady();
}

void Transfer::execute(uint32_t index) {
  const Step& step = prepared_.schedule.steps[index];
  if (const size_t values = local_.valuesOf(step, arriving(index)); values > 0) {
    local_.run(step, {0, values}, arriving(index));
  }
  computed(index);
}

void Transfer::computed(uint32_t index) {
  const Step& step = prepared_.schedule.steps[index];
  StepState& state = states_[index];
  switch (step.kind) {
    case StepKind::Send:
      local_.countSent(step);
      state.outgoing = local_.view(step.src);
      break;
    case StepKind::Recv:
    case StepKind::RecvCopySend:
    case StepKind::RecvReduce:
    case StepKind::RecvReduceCopySend:
      state.staging.release();
      consumed(index);
      state.outgoing = local_.view(step.dst);
      break;
    case StepKind::RecvReduceSend:
      state.outgoing = state.staging.view();
      break; // consumed only when its memory is free again: that is what bounds the memory of a slow next rank
    case StepKind::ReduceMany:
    case StepKind::Copy:
    case StepKind::Scale:
    case StepKind::Encode:
    case StepKind::Decode:
    case StepKind::ReduceEncoded:
      break;
  }
  if (!sends(step.kind)) {
    ended(index);
    return;
  }
  state.sendable = true;
  sendFramesOf(static_cast<size_t>(prepared_.outgoing_of_step[index]));
}

void Transfer::consumed(uint32_t index) {
  const Step& step = prepared_.schedule.steps[index];
  protocol_.consumed(
      operation_->request().id.id,
      step.recv_peer,
      static_cast<int64_t>(prepared_.frameNbytes(step)),
      states_[index].eager);
}

void Transfer::sendFramesOf(size_t edge_index) {
  const Edge& edge = prepared_.outgoing[edge_index];
  size_t& next = leaving_[edge_index].queued;
  const uint64_t op_id = operation_->request().id.id;
  while (next < edge.steps.size() && states_[edge.steps[next]].sendable) {
    const uint32_t index = edge.steps[next];
    StepState& state = states_[index];
    const auto nbytes = static_cast<int64_t>(state.outgoing.nbytes);
    const Protocol::Permission permission = protocol_.maySend(op_id, edge.peer, nbytes);
    if (permission == Protocol::Permission::No) {
      return;
    }
    protocol_.sent(op_id, edge.peer, nbytes, permission);
    OutFrame frame;
    frame.header = protocol_.headerFor(op_id, FrameType::Data, edge.peer);
    frame.header.index = static_cast<uint32_t>(next);
    frame.header.payload_nbytes = static_cast<uint32_t>(nbytes);
    frame.header.aux = permission == Protocol::Permission::Eager ? kEagerFlag : 0;
    frame.payload = state.outgoing;
    frame.step = index;
    ++next;
    send_frame_(edge.peer, std::move(frame));
  }
}

void Transfer::sendFrames(int peer) {
  size_t edge_index = 0;
  if (findEdge(prepared_.outgoing, peer, edge_index) != nullptr) {
    sendFramesOf(edge_index);
  }
}

void Transfer::sent(uint32_t index) {
  const Step& step = prepared_.schedule.steps[index];
  ++leaving_[static_cast<size_t>(prepared_.outgoing_of_step[index])].sent;
  if (step.kind == StepKind::RecvReduceSend) {
    states_[index].staging.release();
    consumed(index);
  }
  ended(index);
  runReady();
}

void Transfer::ended(uint32_t index) {
  --steps_left_;
  if (pieces_ != nullptr) {
    pieces_->stepEnded(index);
  }
  for (uint32_t d = prepared_.dependents_begin[index]; d < prepared_.dependents_begin[index + 1]; ++d) {
    const uint32_t dependent = prepared_.dependents[d];
    if (--states_[dependent].deps_left == 0) {
      becomeReady(dependent);
    }
  }
}

int64_t Transfer::bytesExpected() const noexcept {
  int64_t total = 0;
  for (const Edge& edge : prepared_.incoming) {
    total += edge.nbytes;
  }
  return total;
}

int Transfer::waitsFor() const noexcept {
  for (size_t i = 0; i < prepared_.incoming.size(); ++i) {
    if (next_incoming_[i] < prepared_.incoming[i].steps.size()) {
      return prepared_.incoming[i].peer;
    }
  }
  for (size_t i = 0; i < prepared_.outgoing.size(); ++i) {
    if (leaving_[i].queued < prepared_.outgoing[i].steps.size()) {
      return prepared_.outgoing[i].peer;
    }
  }
  return -1;
}

bool Transfer::needsFrom(int peer) const noexcept {
  for (size_t i = 0; i < prepared_.incoming.size(); ++i) {
    if (prepared_.incoming[i].peer == peer && next_incoming_[i] < prepared_.incoming[i].steps.size()) {
      return true;
    }
  }
  return false;
}

bool Transfer::owes(int peer) const noexcept {
  for (size_t i = 0; i < prepared_.outgoing.size(); ++i) {
    if (prepared_.outgoing[i].peer == peer && leaving_[i].sent < prepared_.outgoing[i].steps.size()) {
      return true;
    }
  }
  return false;
}

} // namespace pycomm
