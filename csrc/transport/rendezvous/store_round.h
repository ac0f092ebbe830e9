#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/abort_token.h"
#include "base/deadline.h"
#include "base/error.h"
#include "transport/rendezvous/store.h"

namespace pycomm {

/// No world is larger.
inline constexpr int kMaxRanks = 1 << 20;

/// The ranks of one generation of a group, exchanging texts in the store. Borrows what it refers to for one call of
/// meet().
struct StoreRound {
  Store& store;
  const AbortToken& abort;
  std::string prefix; ///< of this generation's keys
  int rank = -1;
  int size = 0;
  Deadline deadline = Deadline::never();
  TimePoint begin{};

  /// Throws Error if the text of a rank is not what this rank expects.
  using Judge = std::function<void(int rank, const std::string& text)>;
  /// Names a rank in a report: "rank 1 (host b, pid 77)".
  using Name = std::function<std::string(int rank, const std::string& text)>;

  /// Gives `mine` under `key` and returns the texts of all ranks. Throws what `judge` throws, what another rank
  /// reported with failTogether(), Error(RendezvousTimeout) naming who is missing and who is there, or the token's
  /// reason.
  [[nodiscard]] std::vector<std::string> gather(
      const std::string& key,
      const std::string& mine,
      const Judge& judge,
      const Name& name) const;

  /// Makes `record` the end of this generation on all ranks, unless another one came first. Returns the one that
  /// counts.
  [[nodiscard]] ErrorRecord failTogether(const ErrorRecord& record) const noexcept;
  /// Throws what another rank reported with failTogether(), or the token's reason. Ranks of different world sizes may meet here, so a
  /// record may name a rank that this one's world does not have.
  void throwIfFailed() const;

 private:
  using Texts = std::vector<std::string>; // by rank; empty: not seen yet

  [[nodiscard]] ErrorRecord readError() const;
  [[nodiscard]] bool takeAll(const std::string& key, Texts& texts, const Judge& judge) const;
  void look(const std::string& key, int budget, size_t& next, Texts& texts, const Judge& judge) const;
  [[nodiscard]] Error timedOut(const std::string& key, Texts& texts, const Name& name) const;
};

} // namespace pycomm
