#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/data/credit.h"
#include "engine/data/matching.h"
#include "engine/data/transfer.h"
#include "engine/data/waiting.h"

namespace pycomm::testing {

/// The tables of one rank, and the functions over them by an operation's id: tests and frames name operations so.
class RankTables {
 public:
  using Permission = credit::Permission;
  using Verdict = matching::Verdict;
  using Usage = Tables::Usage;
  struct Config : Limits {
    int rank = 0;
    int size = 1;
    uint32_t group = 0;
    std::vector<std::string> hosts;
  };

  explicit RankTables(const Config& config) : identity(identityOf(config)), tables(identity, config) {}

  // ---- events
  void posted(
      const OperationId& id,
      const Descriptor& descriptor,
      const PreparedSchedule& schedule,
      TimePoint now,
      Deadline deadline = Deadline::never()) {
    Operation::Request request;
    request.id = id;
    request.descriptor = descriptor;
    request.schedule = std::make_shared<PreparedSchedule>(schedule);
    request.deadline = deadline;
    matching::entered(tables, std::make_shared<Operation>(std::move(request)), OperationRow::Runs::Here, now);
  }
  void ended(uint64_t op_id) {
    if (auto node = tables.entered.extract(op_id)) {
      matching::ended(tables, node.mapped());
    }
  }
  void passed(const OperationId& id, const Descriptor& descriptor) {
    matching::passed(tables, id, descriptor);
  }
  [[nodiscard]] Verdict arrived(int peer, const FrameHeader& header, TimePoint now) {
    return matching::headerArrived(tables, tables.find(header.op_id), peer, header, now);
  }
  void answered(int peer, const FrameHeader& header, TimePoint now) {
    waiting::answered(tables, tables.find(header.op_id), peer, header, now);
  }
  void asked(int peer, const FrameHeader& header, TimePoint now) {
    waiting::asked(tables, tables.find(header.op_id), peer, header, now);
  }
  /// This rank asks that peer for messages.
  void asked(int peer) {
    ++tables.peer(peer).asked;
  }
  void asksOnly(uint64_t op_id, const std::vector<int>& ranks, TimePoint now) {
    waiting::asksOnly(tables, *tables.find(op_id), ranks, now);
  }
  [[nodiscard]] bool keepUnexpected(int peer, const FrameHeader& header, TimePoint now) {
    return matching::keep(tables, peer, header, now) != nullptr;
  }
  [[nodiscard]] const char* bytesArrived(uint64_t op_id, int peer, int64_t nbytes, bool eager) {
    return credit::headerArrived(tables, tables.find(op_id), peer, nbytes, eager);
  }
  void consumed(uint64_t op_id, int peer, int64_t nbytes, bool eager) {
    if (OperationRow* const row = tables.find(op_id)) {
      credit::consumed(tables, *row, peer, nbytes, eager);
    }
  }
  [[nodiscard]] const char* granted(uint64_t op_id, int peer, int64_t limit) {
    if (op_id == 0) {
      return credit::gaveRoomBack(tables, peer, limit);
    }
    if (OperationRow* const row = tables.find(op_id)) {
      return credit::granted(tables, *row, peer, limit);
    }
    FrameHeader header;
    header.op_id = op_id;
    Descriptor().writeTo(header);
    return credit::grantedAhead(tables, *matching::keep(tables, peer, header, TimePoint()), peer, limit);
  }
  void sent(uint64_t op_id, int peer, int64_t nbytes, Permission used) {
    credit::queued(tables, *tables.find(op_id)->to(peer), nbytes, used);
  }
  void tick(TimePoint now) {
    waiting::tick(tables, now);
  }

  // ---- questions
  [[nodiscard]] Permission maySend(uint64_t op_id, int peer, int64_t nbytes) const {
    const OperationRow* const row = tables.find(op_id);
    const EdgeRow* const edge = row == nullptr || tables.failed ? nullptr : row->to(peer);
    return edge == nullptr ? Permission::No : credit::maySend(tables, *edge, nbytes);
  }
  [[nodiscard]] bool failed() const noexcept {
    return tables.failed;
  }
  [[nodiscard]] TimePoint nextTick() const noexcept {
    return waiting::nextTick(tables);
  }
  [[nodiscard]] std::optional<NotEntered> missing(uint64_t op_id) const {
    const OperationRow* const row = tables.find(op_id);
    return row == nullptr ? std::nullopt : waiting::missing(*row);
  }
  [[nodiscard]] std::optional<NotEntered> missing(uint64_t op_id, int peer) const {
    const OperationRow* const row = tables.find(op_id);
    return row == nullptr ? std::nullopt : waiting::missing(*row, peer);
  }
  [[nodiscard]] bool isUnexpected(uint64_t op_id) const {
    return tables.findUnexpected(op_id) != nullptr;
  }
  [[nodiscard]] Tables::Usage usage() const {
    return tables.usage();
  }
  [[nodiscard]] std::vector<Action> takeActions() {
    return tables.takeActions();
  }
  [[nodiscard]] std::vector<CreditAction> takeCreditActions() {
    return std::exchange(tables.credit_actions, {});
  }

  const GroupIdentity identity;
  Tables tables;

 private:
  static GroupIdentity identityOf(const Config& config) {
    GroupIdentity identity;
    identity.rank = config.rank;
    identity.size = config.size;
    identity.hash = config.group;
    identity.hosts = config.hosts;
    return identity;
  }
};

} // namespace pycomm::testing
