#include "engine/data/transfer.h"

#include <algorithm>
#include <string>
#include <utility>

#include "engine/data/credit.h"
#include "engine/data/matching.h"

namespace pycomm {
namespace {

constexpr size_t kBeginNbytes = 1 << 10; // to begin a step takes about as long as to read and write so much
constexpr size_t kLeastBegun = 64; // steps, however little is left of the turn

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
      states_((prepared_.schedule.steps.size() + kPageSteps - 1) / kPageSteps),
      working_(working),
      steps_left_(prepared_.schedule.steps.size()) {}

void Transfer::start() {
  begin(kPageSteps);
  list();
}

Transfer::StepState& Transfer::state(uint32_t step) {
  std::unique_ptr<StepState[]>& page = states_[step / kPageSteps];
  if (page == nullptr) {
    const std::vector<Step>& steps = prepared_.schedule.steps;
    const size_t first = step - step % kPageSteps;
    const size_t count = std::min(kPageSteps, steps.size() - first);
    page = std::make_unique<StepState[]>(count);
    for (size_t i = 0; i < count; ++i) {
      page[i].waits_for = steps[first + i].deps_end - steps[first + i].deps_begin + 1;
    }
  }
  return page[step % kPageSteps];
}

BufferView Transfer::staged(uint32_t step) const noexcept {
  const auto found = staged_.find(step);
  return found == staged_.end() ? BufferView() : found->second.view();
}

ConstBufferView Transfer::outgoing(uint32_t index) const {
  const Step& step = prepared_.schedule.steps[index];
  if (step.kind == StepKind::RecvReduceSend) {
    return staged(index);
  }
  return local_.view(step.kind == StepKind::Send ? step.src : step.dst);
}

bool Transfer::mayBegin() const noexcept {
  return begun_ < prepared_.schedule.steps.size() && (pieces_ == nullptr || pieces_->hasInputOf(begun_));
}

void Transfer::begin(size_t steps) {
  for (; steps > 0 && mayBegin(); --steps) {
    const auto next = static_cast<uint32_t>(begun_++);
    release(pieces_ == nullptr ? next : pieces_->stepAt(next));
  }
  runReady();
}

void Transfer::list() {
  if (!listed_ && (mayBegin() || !work_.empty())) {
    working_.push_back(this);
    listed_ = true;
  }
}

void Transfer::release(uint32_t step) {
  if (--state(step).waits_for == 0) {
    becomeReady(step);
  }
}

void Transfer::becomeReady(uint32_t step) {
  if (prepared_.incoming_of_step[step] >= 0 && !state(step).arrived) {
    return;
  }
  if (local_.valuesOf(prepared_.schedule.steps[step], staged(step).ptr) == 0) {
    ready_.push_back(step);
    return;
  }
  work_.push_back(step);
  list();
}

size_t Transfer::work(size_t nbytes) {
  listed_ = false;
  size_t touched = 0;
  if (mayBegin()) { // first: it lets frames go
    const size_t before = begun_;
    begin(std::max(nbytes / kBeginNbytes, kLeastBegun));
    touched = (begun_ - before) * kBeginNbytes;
  } else {
    touched = compute(nbytes);
  }
  list();
  return touched;
}

size_t Transfer::compute(size_t nbytes) {
  const uint32_t index = work_.front();
  const Step& step = prepared_.schedule.steps[index];
  std::byte* const arriving = staged(index).ptr;
  const size_t values = local_.valuesOf(step, arriving);
  const auto [slice, touched] = local_.sliceOf(step, values, worked_, nbytes);
  local_.run(step, slice, arriving);
  worked_ += slice.numel;
  if (worked_ == values) {
    worked_ = 0;
    work_.pop_front();
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
  if (straight && state(index).waits_for == 0) {
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
  StepState& state = this->state(index);
  if (sink.staging) {
    staged_.insert_or_assign(index, std::move(sink.staging));
  }
  state.arrived = true;
  state.eager = (header.aux & kEagerFlag) != 0;
  bytes_arrived_ += header.payload_nbytes;
  if (state.waits_for > 0) {
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
  std::byte* const arriving = staged(index).ptr;
  if (const size_t values = local_.valuesOf(step, arriving); values > 0) {
    local_.run(step, {0, values}, arriving);
  }
  computed(index);
}

void Transfer::computed(uint32_t index) {
  const Step& step = prepared_.schedule.steps[index];
  switch (step.kind) {
    case StepKind::Send:
      local_.countSent(step);
      break;
    case StepKind::Recv:
    case StepKind::RecvCopySend:
    case StepKind::RecvReduce:
    case StepKind::RecvReduceCopySend:
      staged_.erase(index);
      consumed(index);
      break;
    case StepKind::RecvReduceSend:
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
  state(index).sendable = true;
  sendFramesOf(static_cast<size_t>(prepared_.outgoing_of_step[index]));
}

void Transfer::consumed(uint32_t index) {
  const Step& step = prepared_.schedule.steps[index];
  credit::consumed(
      tables_, row_, step.recv_peer, static_cast<int64_t>(prepared_.frameNbytes(step)), state(index).eager);
}

void Transfer::sendFramesOf(size_t edge_index) {
  const std::vector<uint32_t>& steps = prepared_.outgoing[edge_index].steps;
  EdgeRow& edge = row_.outgoing[edge_index];
  while (edge.passed < edge.frames && state(steps[edge.passed]).sendable) {
    const uint32_t index = steps[edge.passed];
    const auto nbytes = static_cast<int64_t>(prepared_.frameNbytes(prepared_.schedule.steps[index]));
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
    frame.payload = outgoing(index);
    frame.step = index;
    credit::queued(tables_, edge, nbytes, permission);
    send_frame_(edge.peer, std::move(frame));
  }
}

void Transfer::roomCame(int peer) {
  if (const EdgeRow* const edge = row_.to(peer)) {
    sendFramesOf(indexOf(row_.outgoing, *edge));
  }
}

void Transfer::sent(uint32_t index) {
  const Step& step = prepared_.schedule.steps[index];
  ++row_.outgoing[static_cast<size_t>(prepared_.outgoing_of_step[index])].done;
  if (step.kind == StepKind::RecvReduceSend) {
    staged_.erase(index);
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
    release(prepared_.dependents[d]);
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
