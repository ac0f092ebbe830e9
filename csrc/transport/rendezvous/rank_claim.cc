#include "transport/rendezvous/rank_claim.h"

#include <poll.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <sstream>

#include "base/error.h"
#include "base/log.h"
#include "base/slow_wait.h"
#include "transport/net/host_identity.h"
#include "transport/rendezvous/rank_record.h"
#include "transport/rendezvous/store_round.h"

// The store counts the claims of each rank. Each claim leaves its owner and, later, its end:
//
//   claim/1 = 3      owner/1/1 = "1 <host> <process A>"   end/1/1 = "left"
//                    owner/1/2 (none)                     end/1/2 = "refused"
//                    owner/1/3 = "2 <host> <process A>"
//
// Here A held rank 1 of generation 1 and gave it back. B came while A held it and was refused; now A holds it again.
// Refused claims do not count, so all ranks arrive at the same generation however often strangers try.
//
// A run that a launcher ended leaves owners without an end, and perhaps not one for each rank: a rank may have died before it came here. So
// after such runs ranks cannot count generations by themselves. Then (Takeover::FromEndedRun) the number of rank 0's claim is the
// generation, which nobody has used before.
//
// A claim that counts deletes owner and end of those before it: nobody looks behind it. Its own stay with the counter, as a store cannot
// delete the three at once, and a counter that began again would give a generation the keys of a former one.

namespace pycomm {
namespace {

constexpr int64_t kMaxLookBack = 10000;
constexpr int64_t kMaxGeneration = int64_t{1} << 53; // far beyond any real count
constexpr const char* kLeft = "left";
constexpr const char* kRefused = "refused";

struct Owner {
  int64_t generation = 0;
  HostIdentity host;
  ProcessIdentity process;

  [[nodiscard]] std::string who() const {
    return host.hostname + ":" + std::to_string(process.pid);
  }
  [[nodiscard]] std::string wireText() const {
    return std::to_string(generation) + " " + host.wireText() + " " + process.wireText();
  }
  [[nodiscard]] static std::optional<Owner> fromWireText(const std::string& text) {
    std::istringstream in(text.substr(0, kMaxRecordNbytes));
    Owner owner;
    std::string host;
    std::string process;
    in >> owner.generation >> host >> process;
    const auto parsed_host = HostIdentity::fromWireText(host);
    const auto parsed_process = ProcessIdentity::fromWireText(process);
    if (!in || owner.generation < 1 || owner.generation > kMaxGeneration || !parsed_host || !parsed_process) {
      return std::nullopt;
    }
    owner.host = *parsed_host;
    owner.process = *parsed_process;
    return owner;
  }
};

std::string keyOf(const std::string& prefix, int rank, const char* what, int64_t number) {
  return prefix + what + "/" + std::to_string(rank) + "/" + std::to_string(number);
}

std::string keyOf(const RankClaim& claim, const char* what, int64_t number) {
  return keyOf(claim.prefix, claim.rank, what, number);
}

Life lifeOf(const Owner& owner) {
  return owner.host == HostIdentity::ofThisProcess() ? owner.process.life() : Life::Unknown;
}

// The launcher promises that it has ended the last run, so what cannot be known counts as ended.
bool mayTake(const std::optional<Owner>& holder, Takeover takeover) {
  return takeover == Takeover::FromEndedRun && (!holder || lifeOf(*holder) != Life::Lives);
}

// The state of an earlier claim, once it is known.
struct Predecessor {
  bool refused = false;
  bool left = false;
  std::optional<Owner> owner;
};

// Waits for it until `end`.
Predecessor lookAt(Store& store, const RankClaim& claim, int64_t number, Deadline end, const AbortToken& abort) {
  Predecessor found;
  for (int pause_ms = kFirstStorePauseMs;; pause_ms = std::min(2 * pause_ms, kLongPauseMs)) {
    abort.throwIfAborted();
    if (const auto how = store.find(keyOf(claim, "end", number))) {
      found.refused = *how == kRefused;
      found.left = !found.refused;
    }
    if (!found.refused) {
      if (const auto owner = store.find(keyOf(claim, "owner", number))) {
        found.owner = Owner::fromWireText(*owner);
      }
    }
    if (found.refused || found.owner || end.expired()) {
      return found;
    }
    (void)::poll(nullptr, 0, end.remainingMs(pause_ms));
  }
}

Error duplicate(const RankClaim& claim, const Owner& me, const std::optional<Owner>& holder) {
  ErrorRecord record;
  record.code = ErrorCode::DuplicateRank;
  record.rank = claim.job.of(claim.rank);
  record.host = me.host.hostname;
  record.peer = record.rank;
  const std::string rank = claim.job.text(claim.rank);
  if (holder && lifeOf(*holder) == Life::Ended) {
    record.summary = "the store still holds " + rank + " of an earlier run, " + holder->who() +
        ", which ended without leaving; " + me.who() + " cannot take it over";
    record.hint = "delete the store's file, or use a new one or a new port";
  } else {
    const std::string first = holder ? holder->who() : "a process that did not say its name";
    record.summary = rank + " is taken: " + first + " came first, " + me.who() + " is refused";
    record.hint =
        "give each process its own RANK and each job its own port; if the first is of an earlier run, delete "
        "the store's file or use a new one";
  }
  record.peer_host = holder ? holder->host.hostname : "";
  return Error(record);
}

// The process that holds the rank if this claim counts, and its generation. `earliest`: the claim that it takes the rank from, or the
// earliest that it has looked at.
Owner ownerOf(
    Store& store,
    const RankClaim& claim,
    Takeover takeover,
    Deadline deadline,
    const AbortToken& abort,
    int64_t& earliest) {
  Owner me;
  me.generation = 1;
  me.host = HostIdentity::ofThisProcess();
  me.process = ProcessIdentity::ofThisProcess();
  const int64_t oldest = std::max<int64_t>(1, claim.number - kMaxLookBack);
  // For the owners of all earlier claims: a process names itself soon after it has counted its claim, and a lost packet is sent again
  // meanwhile. One that looks at earlier claims itself, or is stopped, may take longer.
  const Deadline end = Deadline::at(std::min(deadline.instant(), Deadline::after(kOneTryMs + kOneStepMs).instant()));
  for (int64_t number = claim.number - 1; number >= oldest; --number) {
    const Predecessor before = lookAt(store, claim, number, end, abort);
    earliest = number;
    // Anybody can count a sealed store's claims up, so a claim is one only if its owner signed it.
    if (before.refused || (store.sealed() && !before.owner)) {
      continue;
    }
    const bool mine = before.owner && before.owner->host == me.host && before.owner->process == me.process;
    const bool free = before.owner && (before.left || mine);
    if (!free && !mayTake(before.owner, takeover)) {
      throw duplicate(claim, me, before.owner);
    }
    me.generation = before.owner ? before.owner->generation + 1 : 1;
    break;
  }
  if (takeover == Takeover::FromEndedRun) {
    me.generation = claim.number;
  }
  return me;
}

void deleteClaims(Store& store, const RankClaim& claim, int64_t first) noexcept {
  try {
    for (int64_t number = first; number < claim.number; ++number) {
      (void)store.remove(keyOf(claim, "owner", number));
      (void)store.remove(keyOf(claim, "end", number));
    }
  } catch (const std::exception&) { // not every store can delete
  }
}

void endClaim(Store& store, const RankClaim& claim, const char* how) noexcept {
  try {
    store.set(keyOf(claim, "end", claim.number), how);
  } catch (const std::exception&) {
    // the store is gone, and so is every process that could have asked
  }
}

} // namespace

RankClaim claimRank(
    Store& store,
    const std::string& prefix,
    int rank,
    const JobRanks& job,
    Takeover takeover,
    Deadline deadline,
    const AbortToken& abort) {
  RankClaim claim;
  claim.prefix = prefix;
  claim.rank = rank;
  claim.job = job;
  claim.number = store.add(prefix + "claim/" + std::to_string(rank), 1);
  if (claim.number < 1) {
    throw Error(
        ErrorCode::ProtocolViolation,
        "the store counts " + std::to_string(claim.number) + " claims of " + job.text(rank),
        "is the store shared with another program, or its key overwritten?");
  }
  try {
    int64_t earliest = claim.number;
    const Owner me = ownerOf(store, claim, takeover, deadline, abort, earliest);
    claim.generation = takeover == Takeover::FromEndedRun && rank != 0 ? 0 : me.generation;
    store.set(keyOf(claim, "owner", claim.number), me.wireText());
    deleteClaims(store, claim, earliest);
  } catch (...) {
    endClaim(store, claim, kRefused); // else the next claim would wait for this one's owner
    throw;
  }
  return claim;
}

namespace {

// The newest claim of rank 0 that was not refused and for which `counts` is true; 0 if there is none.
template <typename Counts>
int64_t newestOfRankZero(Store& store, const std::string& prefix, const Counts& counts) {
  const int64_t newest = store.add(prefix + "claim/0", 0);
  for (int64_t number = newest; number >= std::max<int64_t>(1, newest - kMaxLookBack); --number) {
    if (store.find(keyOf(prefix, 0, "end", number)) != kRefused && counts(keyOf(prefix, 0, "owner", number))) {
      return number;
    }
  }
  return 0;
}

} // namespace

int64_t claimOfRankZero(Store& store, const std::string& prefix) {
  const int64_t number = newestOfRankZero(
      store, prefix, [&](const std::string& owner) { return !store.sealed() || store.find(owner).has_value(); });
  return number > 0 && store.find(keyOf(prefix, 0, "end", number)) == kLeft ? 0 : number;
}

int64_t lastClaimOfRankZero(Store& store, const std::string& prefix) {
  return newestOfRankZero(store, prefix, [&](const std::string& owner) { return !store.sealed() || store.has(owner); });
}

bool knownToLive(Store& store, const std::string& prefix, int64_t claim_of_rank_zero) {
  const auto text = store.find(keyOf(prefix, 0, "owner", claim_of_rank_zero));
  const auto owner = text ? Owner::fromWireText(*text) : std::nullopt;
  return owner && lifeOf(*owner) == Life::Lives;
}

void leave(Store& store, const RankClaim& claim) noexcept {
  endClaim(store, claim, kLeft);
}

// ---- the generation of a run that a launcher has started

namespace {

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
        (void)store_.get(keyOf(last_, "member/0"), Deadline::after(kSureToComeMs));
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
  // The list first: the last rank deletes it after it has written the other.
  [[nodiscard]] bool isComplete(int64_t number) const {
    return store_.find(keyOf(number, "member/all")).has_value() || store_.find(keyOf(number, kMade)).has_value();
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
  for (int pause_ms = kFirstStorePauseMs;; pause_ms = std::min(2 * pause_ms, kLongPauseMs)) {
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
