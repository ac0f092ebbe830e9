#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <optional>
#include <string>
#include <vector>

namespace pycomm {

/// Which parameters each rank trains, where ranks may look it up once they disagree.
///
/// Parameters that are frozen or unfrozen on some ranks only give them other buckets, which shows as operations that do not
/// match: true, and no help. So a rank whose set changes writes it into the group's store, and a rank whose operation
/// did not match reads the others'. Nothing is written where nothing changes.
///
/// Not thread-safe.
class TrainedSet {
 public:
  /// `store`: shared by the ranks and by nothing else; null: nobody can look anything up.
  TrainedSet(c10::intrusive_ptr<c10d::Store> store, int rank, std::vector<bool> trained);

  /// This rank trains others from now on. Throws what the store throws.
  void change(std::vector<bool> trained);

  /// Where a rank's parameters are frozen or trained otherwise than here, in words, with the name of the first such
  /// parameter; nothing if no rank is known to differ.
  [[nodiscard]] std::optional<std::string> difference(const std::vector<std::string>& names, int world_size) const;

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  std::vector<bool> at_first_; ///< the same on all ranks: the wrapper has compared them
  std::vector<bool> trained_;
};

} // namespace pycomm
