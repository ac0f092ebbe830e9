#include "engine/data/tables.h"

#include <utility>

#include "engine/data/matching.h"
#include "engine/data/transfer.h"

namespace pycomm {
namespace {

EdgeRow* edgeWith(std::vector<EdgeRow>& edges, int peer) noexcept {
  for (EdgeRow& edge : edges) {
    if (edge.peer == peer) {
      return &edge;
    }
  }
  return nullptr;
}

} // namespace

OperationRow::OperationRow() = default;
OperationRow::~OperationRow() = default;

EdgeRow* OperationRow::from(int peer) noexcept {
  return edgeWith(incoming, peer);
}

EdgeRow* OperationRow::to(int peer) noexcept {
  return edgeWith(outgoing, peer);
}

std::vector<Action> Tables::takeActions() {
  std::vector<Action> taken = std::exchange(actions, {});
  for (const CreditAction& given : std::exchange(credit_actions, {})) {
    const OperationRow* const row = given.op_id == 0 ? nullptr : find(given.op_id);
    if (given.op_id != 0 && row == nullptr) {
      continue; // it has ended since
    }
    Action& action = taken.emplace_back();
    action.peer = given.peer;
    action.op_id = given.op_id;
    switch (given.kind) {
      case CreditAction::Kind::Grant:
        action.kind = Action::Kind::Send;
        action.header = matching::headerFor(*this, row, FrameType::Credit, given.peer);
        action.header.aux = static_cast<uint64_t>(given.nbytes);
        break;
      case CreditAction::Kind::MaySend:
        action.kind = Action::Kind::MaySend;
        break;
    }
  }
  return taken;
}

Tables::Usage Tables::usage() const noexcept {
  Usage usage;
  usage.operations = entered.size();
  usage.unexpected = unexpected.size();
  if (!unexpected.empty()) {
    const auto& [id, row] = *unexpected.begin();
    const auto& [peer, ahead] = *row.peers.begin();
    usage.first_unexpected = {id, ahead.descriptor.kind, peer, ahead.refused, row.frames.size()};
  }
  usage.history = recent.size();
  usage.forgotten = forgotten.size();
  for (const PeerRow& peer : peers) {
    usage.places_taken += peer.collectives + peer.messages;
    usage.asked += peer.asked;
    usage.credited_unexpected += peer.credited_unexpected;
    usage.eager_in += peer.eager_in;
    usage.past += peer.past.size();
    usage.granted_early += peer.granted_early;
  }
  usage.most_past = peers.size() * static_cast<size_t>(limits.eager_pool_nbytes / limits.frame_nbytes + 1);
  return usage;
}

} // namespace pycomm
