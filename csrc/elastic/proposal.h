#pragma once

#include <map>
#include <optional>
#include <vector>

#include "base/deadline.h"
#include "elastic/message.h"

namespace pycomm::elastic {

/// What a proposer knows of its ballot, and which view it proposes.
struct Proposal {
  Ballot ballot;
  MemberSet dead; ///< voters that the ballot does not count
  TimePoint since; ///< when it was sent
  std::map<int, Message> promises; ///< by position
  std::map<Incarnation, Message> newcomers; ///< promises of processes that are no members yet
  std::optional<View> value; ///< what voters are asked to accept
  MemberSet accepted;
  MemberSet left; ///< voters that have said goodbye in order

  /// The members that have given the answer for which the proposer waits.
  [[nodiscard]] MemberSet voters() const noexcept;
};

/// The next view, from the promises of a quorum and what the dead had accepted. nullopt if nobody would be in it, although voters that
/// have not promised may want to go on.
///
/// A view that some voter has accepted is proposed again, the one with the greatest ballot: a quorum may have accepted it. Else the members
/// are those who promised, have not ended since, stay, and reach each other: the one that most others have not heard is dropped, of several
/// the highest, until all pairs are there. Newcomers come behind, those that hold the step after which the view begins and that all members
/// reach.
///
/// The step: if all members had finished the one after the last that anyone has committed, all commit it; so do those who leave with it. If it
/// is summed again, those stay.
[[nodiscard]] std::optional<View> chooseNext(
    const View& view,
    const Proposal& proposal,
    const std::map<int, std::optional<Accepted>>& dead,
    ErrorCode cause);

} // namespace pycomm::elastic
