#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "transport/rendezvous/store.h"

namespace pycomm {

/// The reason why a rank cannot come to the rendezvous at all: its secret cannot be used. So a notice has no seal, in a sealed store too, and
/// anybody who reaches the store can write one. A notice may also be of an earlier run on the same store. Therefore it never ends the wait
/// of another rank: that rank logs it, and names it if the wait times out.
struct Notice {
  int rank = -1;
  std::string host;
  std::string reason; ///< of the secret at most the path of its file

  /// "rank 3 on host b has written into the store that it cannot join: REASON"
  [[nodiscard]] std::string text() const;
};

/// Writes a notice for the ranks that wait for this one in a group.
void postNotice(Store& store, const std::string& group_name, const Notice& notice) noexcept;

/// The notices of one group, as one waiting rank reads them.
class Notices {
 public:
  /// `store` outlives this. `prefix` begins the group's keys, size is its number of ranks.
  Notices(Store& store, std::string prefix, int size);

  /// Reads what is new and logs a warning for each, at most 16 in all: who writes to the store must not fill the log. Does so every 500 ms,
  /// however often it is called; `now` if the caller's wait is over.
  void look(bool now = false);
  /// The newest notice of a rank; null if there is none.
  [[nodiscard]] const Notice* of(int rank) const noexcept;

 private:
  Store& store_;
  const std::string prefix_;
  const int size_;
  TimePoint next_look_;
  std::vector<Notice> found_;
  int64_t read_ = 0; ///< notices, also those that do not parse
};

} // namespace pycomm
