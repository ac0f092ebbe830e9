#include "engine/data/transfer.h"

#include <algorithm>
#include <string>
#include <utility>

#include "engine/data/credit.h"
#include "engine/data/matching.h"

namespace pycomm {
namespace {

size_t indexOf(const std::vector<EdgeRow>& edges, const EdgeRow& edge) noexcept {
  return static_cast<size_t>(&edge - edges.data());
}

} // namespace

Transfer::Transfer(
    Tables& tables,
    OperationRow& row,
    StagingPool& staging,
    const SendFrame& send_frame,
    Working& working)
    : tables_(tables),
      row_(row),
      prepared_(*row.operation->request().schedule),
      staging_(staging),
      send_frame_(send_frame),
      pieces_(row.operation->request().extras().pieces.get()),
      local_(*row.operation, tables.identity.size, staging),
      states_(prepared_.schedule.steps.size()),
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
  tables_.identity.blame(record, peer);
  record.op = row_.operation->name();
  record.sequence = row_.id().sequence;
  record.dtype = dtypeName(row_.descriptor().dtype);
  record.numel = row_.descriptor().numel;
  record.phase = ErrorPhase::Matching;
  record.summary = std::move(summary);
  record.hint = std::move(hint);
  return record;
}

uint32_t Transfer::dueStep(int peer, const FrameHeader& header) const {
  const EdgeRow* const edge = row_.from(peer);
  const JobRanks& job = tables_.identity.job;
  if (edge == nullptr || edge->done >= edge->frames || header.index != edge->done) {
    throw Error(refused(
        ErrorCode::ProtocolViolation,
        peer,
        tables_.identity.rankTitle(peer) + " sent a frame of " + row_.operation->label(job) + " that is not due.",
        "check that all ranks run the same build of pycomm; otherwise report this as a bug"));
  }
  const uint32_t index = prepared_.incoming[indexOf(row_.incoming, *edge)].steps[edge->done];
  const size_t nbytes = prepared_.frameNbytes(prepared_.schedule.steps[index]);
  // The descriptors are equal: what can differ are the sizes of parts, of which a descriptor says nothing.
  if (header.payload_nbytes != nbytes) {
    throw Error(refused(
        ErrorCode::CollectiveMismatch,
        peer,
        "The ranks disagree about the size of a part in " + row_.operation->label(job) + ": " + job.text(peer) +
            " sends " + std::to_string(header.payload_nbytes) + " bytes where this rank expects " +
            std::to_string(nbytes) + ".",
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
  EdgeRow& edge = *row_.from(peer);
  const uint32_t index = prepared_.incoming[indexOf(row_.incoming, edge)].steps[edge.done++];
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
  credit::consumed(
      tables_, row_, step.recv_peer, static_cast<int64_t>(prepared_.frameNbytes(step)), states_[index].eager);
}

void Transfer::sendFramesOf(size_t edge_index) {
  const std::vector<uint32_t>& steps = prepared_.outgoing[edge_index].steps;
  EdgeRow& edge = row_.outgoing[edge_index];
  while (edge.passed < edge.frames && states_[steps[edge.passed]].sendable) {
    const uint32_t index = steps[edge.passed];
    StepState& state = states_[index];
    const auto nbytes = static_cast<int64_t>(state.outgoing.nbytes);
    const credit::Permission permission =
        tables_.failed ? credit::Permission::No : credit::maySend(tables_, edge, nbytes);
    if (permission == credit::Permission::No) {
      return;
    }
    OutFrame frame;
    frame.header = matching::headerFor(tables_, &row_, FrameType::Data, edge.peer);
    frame.header.index = static_cast<uint32_t>(edge.passed);
    frame.header.payload_nbytes = static_cast<uint32_t>(nbytes);
    frame.header.aux = permission == credit::Permission::Eager ? kEagerFlag : 0;
    frame.payload = state.outgoing;
    frame.step = index;
    credit::sent(tables_, edge, nbytes, permission);
    send_frame_(edge.peer, std::move(frame));
  }
}

void Transfer::sendFrames(int peer) {
  if (const EdgeRow* const edge = row_.to(peer)) {
    sendFramesOf(indexOf(row_.outgoing, *edge));
  }
}

void Transfer::sent(uint32_t index) {
  const Step& step = prepared_.schedule.steps[index];
  ++row_.outgoing[static_cast<size_t>(prepared_.outgoing_of_step[index])].done;
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

} // namespace pycomm
