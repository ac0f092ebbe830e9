#pragma once

#include <chrono>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "engine/monitor/roll_call_config.h"
#include "engine/operation/descriptor.h"
#include "engine/operation/issue_context.h"
#include "engine/operation/not_entered.h"

namespace pycomm {

/// One operation that this rank has entered and not ended: what the RollCall knows of the other ranks in it, and when it asks them.
///
/// An operation that waits asks the ranks on its edges once, after Config::waiting_after_ms, and all ranks three times: the first
/// answers may be lost, or be true no more. Bytes that arrive begin the wait anew, but not the count of questions.
/// Thread: the RollCall's owner's.
class EnteredOperation {
 public:
  void enter(const OperationId& id, const Descriptor& descriptor, Deadline deadline, TimePoint now);

  [[nodiscard]] const OperationId& id() const noexcept {
    return id_;
  }
  [[nodiscard]] const Descriptor& descriptor() const noexcept {
    return descriptor_;
  }
  /// Once it has been reported: when it is reported again.
  [[nodiscard]] Deadline deadline() const noexcept {
    return deadline_;
  }
  void reportAgain(Deadline at) noexcept {
    deadline_ = at;
  }
  /// Messages are their two ranks' business: nobody else is asked about one.
  [[nodiscard]] bool isMessage() const noexcept {
    return descriptor_.kind == Collective::Send;
  }

  // ---- what other ranks have done
  /// A frame shows that this rank has entered it.
  void came(int peer);
  [[nodiscard]] bool hasCome(int peer) const {
    return came_.count(peer) != 0;
  }
  /// This rank said that it has not entered it, and `last` of what it entered last.
  void lacks(int peer, std::string last);
  /// Bytes of it have arrived.
  void progressed(TimePoint now) noexcept;
  /// The lowest rank that said that it has not entered it; or that rank's word.
  [[nodiscard]] std::optional<NotEntered> missing() const;
  [[nodiscard]] std::optional<NotEntered> missing(int peer) const;

  // ---- questions
  /// Only these ranks are asked. True if some are, and none was before: the wait begins now.
  [[nodiscard]] bool asksOnly(const std::vector<int>& ranks, TimePoint now);
  /// Whether it asks anybody.
  [[nodiscard]] bool asks() const noexcept {
    return !asks_only_ || !asks_only_->empty();
  }
  [[nodiscard]] bool mayAsk(int peer) const {
    return !asks_only_ || asks_only_->count(peer) != 0;
  }
  /// How long it has waited: since it was entered, or a byte moved.
  [[nodiscard]] Clock::duration waited(TimePoint now) const noexcept {
    return now - since_;
  }
  /// When the ranks on edges are asked, if they have not been.
  [[nodiscard]] TimePoint firstQuestion(const RollCallConfig& config) const noexcept {
    return since_ + std::chrono::milliseconds(config.waiting_after_ms);
  }
  /// The ranks on unfinished edges are to be asked now. True once.
  [[nodiscard]] bool takeFirstQuestion(TimePoint now, const RollCallConfig& config) noexcept;
  /// A message was announced, which asks as well.
  void announced() noexcept {
    told_waiting_ = true;
  }
  /// All ranks are to be asked now. True once for each round.
  [[nodiscard]] bool takeRound(TimePoint now, const RollCallConfig& config) noexcept;
  /// This round leaves out the ranks that are known to have entered.
  [[nodiscard]] bool roundLeavesOutKnown() const noexcept {
    return rounds_ == 2;
  }
  /// The earliest time at which a question is due; TimePoint::max() if none is any more.
  [[nodiscard]] TimePoint nextQuestion(const RollCallConfig& config) const noexcept;

 private:
  [[nodiscard]] bool asksEveryone(const RollCallConfig& config) const noexcept;
  [[nodiscard]] std::chrono::milliseconds nextRound(const RollCallConfig& config) const noexcept;

  OperationId id_;
  Descriptor descriptor_;
  Deadline deadline_ = Deadline::never();
  TimePoint since_; ///< entered, or last byte moved
  bool told_waiting_ = false; ///< the ranks on unfinished edges know
  int rounds_ = 0; ///< how often all ranks have been asked
  std::optional<std::set<int>> asks_only_; ///< none: all
  bool asked_them_ = false; ///< those of asks_only_
  std::set<int> came_;
  std::vector<NotEntered> missing_; ///< each rank once
};

} // namespace pycomm
