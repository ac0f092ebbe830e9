#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/job_ranks.h"
#include "transport/rendezvous/member_handle.h"

namespace pycomm {

/// One call of reconfigure(), as one of its members has it: who meets whom under which uuid, and whether it has failed.
///
/// That of the first member is also the store in which all of them meet. It lives in that process's memory and only while they meet, so no
/// store of torch's is needed. It fails as a whole and for good: when a member gives up, when a connection of one ends before all are ready,
/// or when the first member says so. From then on every call throws the first cause. Any thread.
class Instance {
 public:
  /// `job`: what records and texts call the members.
  Instance(int64_t uuid, std::vector<MemberHandle> members, JobRanks job = {});

  [[nodiscard]] const std::string& name() const noexcept {
    return name_;
  }
  [[nodiscard]] int64_t uuid() const noexcept {
    return uuid_;
  }
  [[nodiscard]] int size() const noexcept {
    return static_cast<int>(members_.size());
  }
  [[nodiscard]] const MemberHandle& member(int rank) const {
    return members_.at(static_cast<size_t>(rank));
  }
  [[nodiscard]] const JobRanks& job() const noexcept {
    return job_;
  }
  /// "rank 1 of the new group (host b, pid 77)"
  [[nodiscard]] std::string who(int rank) const;
  /// A record of trouble with `rank`, of this meeting. `says`: what follows its name.
  [[nodiscard]] ErrorRecord trouble(ErrorCode code, int rank, const std::string& says, const std::string& hint) const;

  // The store. All throw Error(failure()) once there is one.
  void set(const std::string& key, std::string value);
  [[nodiscard]] std::optional<std::string> find(const std::string& key) const;
  [[nodiscard]] bool has(const std::string& key) const;
  [[nodiscard]] int64_t add(const std::string& key, int64_t amount); ///< also Error(ProtocolViolation): sum too large
  bool remove(const std::string& key);

  struct Ready {
    int count = 0;
    int first_missing = -1;
  };
  /// A member has its group, complete and connected. Throws as above.
  [[nodiscard]] Ready ready(int rank);

  /// A member has a connection to this one. False if it has one already.
  [[nodiscard]] bool enter(int rank);
  [[nodiscard]] bool hasEntered(int rank) const;
  /// The connection of a member that has entered has ended: a failure, unless all are ready. But one that does not know yet that it has
  /// entered may only have been tired of waiting for the answer, and enters again. Destructors call this.
  void left(int rank, bool knows_that_it_entered) noexcept;

  /// The first cause counts. False if all are ready: then none counts, and the meeting has succeeded.
  bool fail(const ErrorRecord& cause);
  /// A member that has entered knows why this has failed.
  void told(int rank);
  /// All members that have entered, but the first, know it.
  [[nodiscard]] bool allTold() const;
  [[nodiscard]] std::optional<ErrorRecord> failure() const;
  /// All are ready.
  [[nodiscard]] bool complete() const;
  /// Frees what it has stored: all are ready, or it has failed.
  void forget();

 private:
  void throwIfFailed() const;
  void reserve(size_t nbytes); ///< throws Error(ProtocolViolation) beyond kMaxStored
  [[nodiscard]] bool isComplete() const noexcept {
    return ready_count_ == size();
  }

  static constexpr size_t kMaxStored = 64 << 20; ///< bytes: a thousand ranks write a few hundred KB

  const int64_t uuid_;
  const std::vector<MemberHandle> members_;
  const JobRanks job_;
  const std::string name_;
  mutable std::mutex mutex_; ///< guards the rest
  std::map<std::string, std::string> values_;
  std::map<std::string, int64_t> counters_;
  size_t stored_ = 0;
  std::vector<bool> entered_; ///< by rank
  std::vector<bool> told_; ///< by rank
  std::vector<bool> ready_; ///< by rank
  int ready_count_ = 0;
  std::optional<ErrorRecord> failure_;
};

} // namespace pycomm
