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

constexpr int kLongestPauseMs = 100;

class Search {
 public:
  Search(const StoreRound& round, const std::string& prefix, int64_t newest_before)
      : round_(round), store_(round.store), prefix_(prefix), newest_before_(newest_before) {}

  [[nodiscard]] std::optional<Generation> look() {
    const int64_t claimed = claimOfRankZero(store_, prefix_);
    if (claimed > 0 && !isComplete(claimed) && !store_.find(keyOf(claimed, "error"))) {
      return Generation{
          claimed, [&store = store_, &prefix = prefix_, claimed] { return claimOfRankZero(store, prefix) != claimed; }};
    }
    last_ = lastClaimOfRankZero(store_, prefix_);
    if (last_ == 0 || isComplete(last_)) {
      return std::nullopt;
    }
    if (store_.find(keyOf(last_, "error"))) {
      const bool took_part = store_.has(keyOf(last_, "member/" + std::to_string(round_.rank))); // once is enough
      const bool of_this_run = last_ > newest_before_ || knownToLive(store_, prefix_, last_);
      return of_this_run && !took_part ? std::optional<Generation>(Generation{last_, nullptr}) : std::nullopt;
    }
    if (isOfAnotherSecret(last_) && !store_.has(keyOf(last_, "error"))) {
      return Generation{last_, [&store = store_, &prefix = prefix_, last = last_] {
                          return claimOfRankZero(store, prefix) > last || lastClaimOfRankZero(store, prefix) != last;
                        }};
    }
    return std::nullopt;
  }

  /// Of a rank 0 that failed, or that has another secret, but maybe in an earlier run.
  [[nodiscard]] std::string lastAttempt() const {
    if (last_ == 0 || isComplete(last_)) {
      return "";
    }
    StoreRound last{store_, round_.abort, prefix_ + std::to_string(last_) + "/"};
    try {
      last.throwIfFailed();
      if (isOfAnotherSecret(last_)) {
        (void)store_.get(keyOf(last_, "member/0"), Deadline::after(Store::kReadTimeoutMs));
      }
    } catch (const Error& error) {
      return "; the last attempt of rank 0, maybe in an earlier run, ended with: " + error.record().summary;
    }
    return "";
  }

 private:
  [[nodiscard]] std::string keyOf(int64_t number, const std::string& key) const {
    return prefix_ + std::to_string(number) + "/" + key;
  }
  [[nodiscard]] bool isComplete(int64_t number) const {
    return store_.find(keyOf(number, "member/all")).has_value();
  }
  [[nodiscard]] bool isOfAnotherSecret(int64_t number) const {
    const std::string key = keyOf(number, "member/0");
    return store_.sealed() && store_.has(key) && !store_.find(key);
  }

  const StoreRound& round_;
  Store& store_;
  const std::string& prefix_;
  const int64_t newest_before_; ///< the last claim of rank 0 when this rank came
  int64_t last_ = 0; ///< and now
};

} // namespace

Generation findGeneration(const StoreRound& round, const std::string& prefix, int64_t newest_before) {
  SlowWait slow(Clock::now());
  Search search(round, prefix, newest_before);
  for (int pause_ms = 1;; pause_ms = std::min(2 * pause_ms, kLongestPauseMs)) {
    round.abort.throwIfAborted();
    if (const auto found = search.look()) {
      return *found;
    }
    const std::string rank = round.job.text(round.rank);
    const std::string first = round.job.text(0);
    if (round.notices != nullptr) {
      round.notices->poll([](int other) { return other == 0; });
    }
    if (round.deadline.expired()) {
      const std::optional<Notice> notice = round.notices == nullptr ? std::nullopt : round.notices->of(0);
      throw Error(
          ErrorCode::RendezvousTimeout,
          "The rendezvous timed out: " + rank + " waited for " + first + ", which did not come" + search.lastAttempt() +
              (notice ? "; " + notice->text() : ""),
          "did " + first + " start? Its own output says why it ended; a longer timeout helps slow starters");
    }
    if (const auto waited_s = slow.due(Clock::now())) {
      log(LogLevel::Warn,
          rank + " on " + localHostName() + " has waited " + std::to_string(*waited_s) + " s in the rendezvous for " +
              first + ". If it has started, try on each host: python -m pycomm doctor");
    }
    (void)::poll(nullptr, 0, round.deadline.remainingMs(pause_ms));
  }
}

} // namespace pycomm
