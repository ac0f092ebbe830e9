#include "transport/rendezvous/find_generation.h"

#include <poll.h>

#include <algorithm>
#include <optional>

#include "base/error.h"
#include "base/log.h"
#include "base/slow_wait.h"
#include "transport/rendezvous/rank_claim.h"

namespace pycomm {
namespace {

constexpr int kRestartMs = 10000; // by which the ranks of a new run may start before its rank 0
constexpr int kOtherSecretMs = 3000; // the same, if all that is there of rank 0 has another secret, or none
constexpr int kLongestPauseMs = 100;

// The generation of rank 0's last claim, if this rank has waited long enough for a newer one: it ended with an error before all ranks knew
// each other, or rank 0 has another secret, or none. A rank that joins it finds that error, or that record, and rank 0 finds this rank's.
std::optional<Generation> lastResort(Store& store, const std::string& prefix, int64_t waited_ms) {
  if (waited_ms < std::min(kOtherSecretMs, kRestartMs)) {
    return std::nullopt;
  }
  const int64_t number = lastClaimOfRankZero(store, prefix);
  const std::string keys = prefix + std::to_string(number) + "/";
  if (number == 0 || store.find(keys + "member/all")) {
    return std::nullopt;
  }
  const bool other_secret = store.sealed() && store.has(keys + "member/0") && !store.find(keys + "member/0");
  if (waited_ms < (other_secret ? kOtherSecretMs : kRestartMs) || !(other_secret || store.find(keys + "error"))) {
    return std::nullopt;
  }
  return Generation{number, false};
}

} // namespace

Generation findGeneration(const StoreRound& round, const std::string& prefix) {
  const TimePoint begin = Clock::now();
  SlowWait slow(begin);
  for (int pause_ms = 1;; pause_ms = std::min(2 * pause_ms, kLongestPauseMs)) {
    round.abort.throwIfAborted();
    const int64_t number = claimOfRankZero(round.store, prefix);
    const std::string keys = prefix + std::to_string(number) + "/";
    if (number > 0 && !round.store.find(keys + "member/all") && !round.store.find(keys + "error")) {
      return Generation{number};
    }
    const int64_t waited_ms = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count();
    if (const auto last = lastResort(round.store, prefix, round.deadline.expired() ? kRestartMs : waited_ms)) {
      return *last;
    }
    const std::string rank = std::to_string(round.rank);
    if (round.notices != nullptr) {
      round.notices->poll([](int other) { return other == 0; });
    }
    if (round.deadline.expired()) {
      const std::optional<Notice> notice = round.notices == nullptr ? std::nullopt : round.notices->of(0);
      throw Error(
          ErrorCode::RendezvousTimeout,
          "The rendezvous timed out: rank " + rank + " waited for rank 0, which did not come" +
              (notice ? "; " + notice->text() : ""),
          "did rank 0 start? Its own output says why it ended; a longer timeout helps slow starters");
    }
    if (const auto waited_s = slow.due(Clock::now())) {
      log(LogLevel::Warn,
          "rank " + rank + " on " + localHostName() + " has waited " + std::to_string(*waited_s) +
              " s in the rendezvous for rank 0. If it has started, try on each host: python -m pycomm doctor");
    }
    (void)::poll(nullptr, 0, round.deadline.remainingMs(pause_ms));
  }
}

} // namespace pycomm
