#include "engine/data/transfers.h"

#include <memory>
#include <utility>

#include "base/fault_point.h"
#include "engine/data/matching.h"
#include "engine/data/waiting.h"
#include "engine/report/failure_text.h"

namespace pycomm {
namespace {

// Operations that expect more than this are not looked for: a large one's bytes are better read when many have come.
constexpr int64_t kLookNbytes = 256 << 10;
// No operation is looked for if more than this are under way.
constexpr size_t kLookOperations = 64;

// A rank from which frames are still due, or to which frames still have to go; -1 if none.
int waitsFor(const OperationRow& row) noexcept {
  for (const EdgeRow& edge : row.incoming) {
    if (edge.done < edge.frames) {
      return edge.peer;
    }
  }
  for (const EdgeRow& edge : row.outgoing) {
    if (edge.passed < edge.frames) {
      return edge.peer;
    }
  }
  return -1;
}

} // namespace

// ---- events

OperationRow& Transfers::add(const std::shared_ptr<Operation>& operation, TimePoint now) {
  OperationRow& row = matching::entered(tables_, operation, OperationRow::Runs::Here, now, [this](OperationRow& built) {
    built.transfer = std::make_unique<Transfer>(tables_, built, staging_, send_frame_, working_);
  });
  data_loop_.addBusy(1);
  operation->mark().running(now, row.transfer->bytesExpected());
  return row;
}

void Transfers::replayUnexpected(OperationRow& row) {
  for (UnexpectedFrame& frame : std::exchange(row.unexpected, {})) {
    row.transfer->expect(frame.peer, frame.header);
    Sink sink;
    sink.into = frame.staging.view();
    sink.staging = std::move(frame.staging);
    sink.unexpected = true;
    row.transfer->arrived(frame.peer, frame.header, std::move(sink));
    row.operation->mark().received(row.transfer->bytesArrived());
  }
}

Sink Transfers::place(OperationRow& row, int peer, const FrameHeader& header, TimePoint now) {
  Sink sink = row.transfer->place(peer, header);
  row.operation->mark().arriving(now);
  return sink;
}

Sink Transfers::placeUnexpected(const FrameHeader& header) {
  Sink sink;
  sink.unexpected = true;
  if (header.payload_nbytes > 0) {
    sink.staging = staging_.take(header.payload_nbytes);
    sink.into = sink.staging.view();
  }
  return sink;
}

bool Transfers::arrived(OperationRow* row, int peer, const FrameHeader& header, Sink&& sink) {
  if (row == nullptr || row->transfer == nullptr) {
    UnexpectedRow* const unexpected = sink.unexpected ? tables_.findUnexpected(header.op_id) : nullptr;
    if (unexpected != nullptr) {
      unexpected->frames.push_back(UnexpectedFrame{peer, header, std::move(sink.staging)});
    }
    return false;
  }
  if (sink.unexpected) { // posted between its header and its last byte
    row->transfer->expect(peer, header);
  }
  row->transfer->arrived(peer, header, std::move(sink));
  row->operation->mark().received(row->transfer->bytesArrived());
  return true;
}

Transfers::Worked Transfers::work(size_t nbytes) {
  Transfer& transfer = *working_.front();
  working_.pop_front();
  const size_t touched = transfer.work(nbytes);
  return {&transfer.row(), touched};
}

bool Transfers::isComplete(const OperationRow& row) {
  if (row.transfer == nullptr || !row.transfer->complete()) {
    return false;
  }
  PYCOMM_FAULT_POINT("operation.finish");
  return true;
}

// ---- questions

bool Transfers::addDuePeers(std::vector<int>& peers) const {
  size_t under_way = 0;
  for (const auto& entry : tables_.entered) {
    const OperationRow& row = entry.second;
    if (row.transfer == nullptr) {
      continue;
    }
    if (++under_way > kLookOperations) {
      return false;
    }
    if (row.transfer->bytesExpected() > kLookNbytes) {
      continue;
    }
    for (const EdgeRow& edge : row.incoming) {
      if (edge.done < edge.frames) {
        peers.push_back(edge.peer);
      }
    }
  }
  return true;
}

ErrorRecord Transfers::overdue(const OperationRow& row) const {
  const Transfer& transfer = *row.transfer;
  if (!transfer.inputComplete()) {
    return inputLate(*row.operation, transfer.bytesExpected(), tables_.identity);
  }
  return timedOut(
      *row.operation,
      transfer.bytesArrived(),
      transfer.bytesExpected(),
      waitsFor(row),
      waiting::missing(row),
      tables_.identity);
}

} // namespace pycomm
