#include "transport/rendezvous/store_round.h"

#include <poll.h>

#include <algorithm>
#include <exception>

#include "base/fault_point.h"
#include "base/log.h"
#include "transport/rendezvous/rank_record.h"
#include "transport/rendezvous/sealed_store.h"

namespace pycomm {
namespace {

constexpr int kLooksOfRankZero = 256; // single texts polled between two pauses
constexpr int kLooksOfOthers = 8;
constexpr size_t kReadByOthers = 1 + 32; // rank 0 and the next ones
constexpr size_t kPartNbytes = 1 << 20; // of a list
constexpr int kLooksForLine = 64; // single texts looked for to log a slow wait
constexpr size_t kMaxNamed = 16; // ranks listed one by one in a report
constexpr size_t kMaxReasons = 2; // notices in it: ranks of one host often have the same

std::string listed(const std::vector<std::string>& names) {
  std::string out;
  for (size_t i = 0; i < std::min(names.size(), kMaxNamed); ++i) {
    out += (i == 0 ? "" : ", ") + names[i];
  }
  return names.size() <= kMaxNamed ? out : out + " and " + std::to_string(names.size() - kMaxNamed) + " more";
}

std::string keyOf(const std::string& prefix, const std::string& key, size_t rank) {
  return prefix + key + "/" + std::to_string(rank);
}

// Part 0 is the one that is written last.
std::string listKey(const std::string& prefix, const std::string& key, size_t part) {
  return prefix + key + "/all" + (part == 0 ? "" : "/" + std::to_string(part));
}

} // namespace

std::vector<std::string> StoreRound::gather(
    const std::string& round,
    const std::string& mine,
    const Judge& judge,
    const Name& name) const {
  const std::string key = binding + round;
  Texts texts(static_cast<size_t>(size));
  texts[static_cast<size_t>(rank)] = mine;
  PYCOMM_FAULT_POINT("rendezvous.publish");
  store.set(keyOf(prefix, key, static_cast<size_t>(rank)), mine);
  PYCOMM_FAULT_POINT("rendezvous.published");
  size_t next = 0;
  const bool had_error = over && store.has(prefix + "error");
  const TimePoint entered = Clock::now();
  SlowWait slow(entered);
  for (int pause_ms = kFirstStorePauseMs;; pause_ms = std::min(pause_ms * 2, kLongPauseMs)) {
    throwIfFailed();
    const bool waits_long = Clock::now() - entered > std::chrono::milliseconds(kOneStepMs);
    if (!members.empty() && waits_long && store.find(prefix + "error")) { // the rounds after the first take less
      throw Error(
          ErrorCode::ProtocolViolation,
          "the store holds the error of a process that is no rank of this group",
          "does another job use the same store and group name, or does somebody else write to the store?");
    }
    PYCOMM_FAULT_POINT("rendezvous.wait");
    const bool is_over = over && over(); // asked before the list, which rank 0 writes before it goes
    if (rank != 0 && takeAll(key, texts, judge)) {
      return texts;
    }
    const bool has_new_error = over && !had_error && store.has(prefix + "error");
    if (is_over || has_new_error) {
      throwIfFailed();
    }
    if (has_new_error) { // of a rank with another secret, and of this run
      (void)look(key, size, texts.size(), next, texts, judge);
    }
    if (is_over) {
      throw GenerationOver{};
    }
    bool found = false;
    if (rank == 0) {
      found = look(key, kLooksOfRankZero, texts.size(), next, texts, judge);
    } else if (!over) {
      found = look(key, kLooksOfOthers, std::min(texts.size(), kReadByOthers), next, texts, judge);
    }
    pause_ms =
        found ? kFirstStorePauseMs : pause_ms; // ranks that come at the same time are read without pauses of 100 ms
    const bool complete = std::find(texts.begin(), texts.end(), "") == texts.end();
    if (rank == 0 && complete) {
      giveAll(key, texts);
      return texts;
    }
    if (deadline.expired()) {
      throw timedOut(key, texts, name);
    }
    if (notices != nullptr) {
      notices->poll([&](int other) { return isMissing(key, texts, static_cast<size_t>(other)); });
    }
    logSlow(slow, key, texts);
    pauseFor(pause_ms, deadline, abort);
  }
}

void removeList(Store& store, const std::string& prefix, const std::string& key) {
  for (size_t part = 0; store.remove(listKey(prefix, key, part)); ++part) {
  }
}

void StoreRound::throwIfFailed() const {
  abort.throwIfAborted();
  if (const auto record = findError()) {
    throw Error(*record);
  }
}

// The error of another job, which the same secret has sealed, might be put in the place of this job's. So in a sealed store
//
//   <generation>/<binding>error   is of a rank that knows all member records: nobody else could name the key;
//   <generation>/error            begins with a digest of its writer's member record. A rank that knows all of them believes no other,
//                                 but does not wait long beside it: the writer may have been given another list. A rank that does
//                                 not know them believes it: a process that can write there could stop it in other ways, too.
std::optional<std::string> StoreRound::findErrorText() const {
  std::optional<std::string> text = store.find(prefix + binding + "error");
  if (!store.sealed() || (text && !binding.empty())) {
    return text;
  }
  if (!binding.empty()) {
    text = members.empty() ? std::nullopt : store.find(prefix + "error");
  }
  if (!text) {
    return std::nullopt;
  }
  const std::string writer = text->substr(0, text->find('\n'));
  if (!members.empty() && std::find(members.begin(), members.end(), writer) == members.end()) {
    return std::nullopt;
  }
  return text->substr(std::min(text->size(), writer.size() + 1));
}

std::optional<ErrorRecord> StoreRound::findError() const {
  const std::optional<std::string> text = findErrorText();
  return text ? std::optional<ErrorRecord>(errorIn(*text)) : std::nullopt;
}

ErrorRecord StoreRound::errorIn(const std::string& text) const {
  if (auto record = ErrorRecord::deserialize(text, kMaxRanks)) {
    return *std::move(record);
  }
  if (!store.sealed()) {
    refuseSealed(prefix + "error", text, job);
  }
  ErrorRecord broken;
  broken.code = ErrorCode::ProtocolViolation;
  broken.summary = "the store holds an error report that no pycomm wrote";
  broken.hint = "is the store shared with another program?";
  return broken;
}

std::string StoreRound::read(const std::string& key) const {
  std::string text = store.get(key, Deadline::after(kSureToComeMs));
  if (!store.sealed()) {
    refuseSealed(key, text, job);
  }
  return text;
}

void StoreRound::giveAll(const std::string& key, const Texts& texts) const {
  std::vector<std::string> parts(1);
  for (const std::string& text : texts) {
    const std::string joined = joinTexts({text});
    if (parts.back().size() + joined.size() > kPartNbytes) {
      parts.emplace_back();
    }
    parts.back() += joined;
  }
  for (size_t part = parts.size(); part-- > 0;) { // who sees the first finds the others
    store.set(listKey(prefix, key, part), parts[part]);
  }
}

bool StoreRound::takeAll(const std::string& key, Texts& texts, const Judge& judge) const {
  if (!store.has(listKey(prefix, key, 0))) {
    return false;
  }
  auto all = splitTexts(read(listKey(prefix, key, 0)));
  for (size_t part = 1; all && all->size() < texts.size() && store.has(listKey(prefix, key, part)); ++part) {
    const auto more = splitTexts(read(listKey(prefix, key, part)));
    if (!more) {
      all.reset();
      break;
    }
    all->insert(all->end(), more->begin(), more->end());
  }
  // Judged before counted: if the world sizes differ, only the single records show the mismatch.
  for (size_t other = 0; all && other < all->size(); ++other) {
    if (other != static_cast<size_t>(rank)) {
      judge(static_cast<int>(other), (*all)[other]);
    }
  }
  if (!all || all->size() != texts.size()) {
    throw Error(
        ErrorCode::ProtocolViolation,
        job.text(0) + "'s list of " + key + " records in the store cannot be read",
        "is the store shared with another program?");
  }
  if ((*all)[static_cast<size_t>(rank)] != texts[static_cast<size_t>(rank)]) {
    // Of another job, perhaps: what this rank has just written is the part that nobody could have prepared.
    throw NotInList(
        Error(
            ErrorCode::ProtocolViolation,
            "the list of " + key + " records in the store does not have the record that this rank wrote",
            "does another job use the same store and group name, or does somebody else write to the store?"),
        *all);
  }
  texts = *all;
  return true;
}

bool StoreRound::look(const std::string& key, int budget, size_t among, size_t& next, Texts& texts, const Judge& judge)
    const {
  bool found = false;
  for (size_t tried = 0; tried < among && budget > 0; ++tried, ++next) {
    next = next < among ? next : 0;
    const size_t other = next == 0 ? 0 : (static_cast<size_t>(rank) + next) % texts.size();
    if (!texts[other].empty()) {
      continue;
    }
    --budget;
    if (store.has(keyOf(prefix, key, other))) {
      const std::string text = read(keyOf(prefix, key, other));
      judge(static_cast<int>(other), text);
      texts[other] = text;
      found = true;
    }
  }
  return found;
}

Error StoreRound::timedOut(const std::string& key, Texts& texts, const Name& name) const {
  std::vector<std::string> missing;
  std::vector<std::string> present;
  ErrorRecord record;
  for (size_t other = 0; other < texts.size(); ++other) {
    if (isMissing(key, texts, other)) {
      missing.push_back(std::to_string(job.of(static_cast<int>(other))));
      record.peer = record.peer < 0 ? job.of(static_cast<int>(other)) : record.peer;
    } else {
      present.push_back(name(static_cast<int>(other), texts[other]));
    }
  }
  if (missing.empty()) { // all ranks arrived, so rank 0 is the one that did not continue
    record.peer = job.of(0);
    missing.push_back(std::to_string(record.peer) + " (it came" + maybeEarlier() + " but does not go on)");
  }
  std::string reasons;
  size_t named = 0;
  for (int other = 0; notices != nullptr && other < size && named < kMaxReasons; ++other) {
    const std::optional<Notice> notice =
        isMissing(key, texts, static_cast<size_t>(other)) ? notices->of(other) : std::nullopt;
    if (notice) {
      reasons += "; " + notice->text();
      ++named;
    }
  }
  const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count();
  record.code = ErrorCode::RendezvousTimeout;
  record.summary = "The rendezvous timed out: " + job.text(rank) + " waited " + std::to_string(waited) + " ms for " +
      std::to_string(size) + " ranks" + ofWhich() + "; missing: " + listed(missing) + "; present: " + listed(present) +
      reasons;
  record.hint =
      std::string(
          reasons.empty()
              ? ""
              : "if it is true that such a rank cannot join, do what it says on its host and start the job again; "
                "otherwise: ") +
      "did the missing ranks start, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE? Their own output "
      "says why they ended; a longer timeout helps slow starters";
  return Error(record);
}

bool StoreRound::isMissing(const std::string& key, const Texts& texts, size_t other) const {
  return texts[other].empty() && !store.has(keyOf(prefix, key, other));
}

std::string StoreRound::maybeEarlier() const {
  return over ? ", maybe in an earlier run," : ",";
}

std::string StoreRound::ofWhich() const {
  const std::string list = job.list();
  return list.empty() ? "" : ": " + list;
}

// Every rank logs the first line, since each host may have a log of its own. Rank 0 logs the later ones, or all ranks while it is missing.
void StoreRound::logSlow(SlowWait& slow, const std::string& key, const Texts& texts) const {
  const auto waited_s = slow.due(Clock::now());
  if (!waited_s) {
    return;
  }
  std::vector<std::string> missing;
  size_t looked = 0;
  for (int budget = kLooksForLine; looked < texts.size() && budget > 0; ++looked) {
    budget -= texts[looked].empty() ? 1 : 0;
    if (isMissing(key, texts, looked)) {
      missing.push_back(std::to_string(job.of(static_cast<int>(looked))));
    }
  }
  const bool all = looked == texts.size();
  if (slow.lines() > 1 && rank != 0 && (missing.empty() || missing.front() != std::to_string(job.of(0)))) {
    return;
  }
  const std::string who =
      job.text(rank) + " on " + localHostName() + " has waited " + std::to_string(*waited_s) + " s for ";
  const std::string in_all = " (" + std::to_string(size) + " ranks in all" + ofWhich() + "). ";
  std::string whom;
  if (missing.empty()) {
    whom = (all ? job.text(0) + " to go on; all ranks have joined" + (over ? ", some maybe in an earlier run" : "")
                : "ranks from " + std::to_string(job.of(static_cast<int>(looked))) + " on to join") +
        in_all + "Try";
  } else if (missing.size() == 1 && all) {
    whom = "rank " + missing.front() + ", which has not joined" + in_all + "If it has started, try";
  } else {
    whom = "ranks " + listed(missing) + (all ? "" : " and maybe others") + ", which have not joined" + in_all +
        "If they have started, try";
  }
  const std::string names = job.list().empty()
      ? ""
      : ". Or is that rank in another number of groups? Then new_group(use_local_synchronization=True) gives it another name to wait under";
  log(LogLevel::Warn, who + whom + " on each host: python -m pycomm doctor" + names);
}

ErrorRecord StoreRound::failTogether(ErrorRecord record) const noexcept {
  try {
    // An aborted rank reports the abort, independent of the other ranks' errors.
    if (!store.sealed()) {
      const bool is_first = store.add(prefix + "errors", 1) == 1;
      if (!is_first && abort.aborted()) {
        return record; // the rank that was first may have ended before it wrote
      }
      if (!is_first) {
        ErrorRecord first = errorIn(store.get(prefix + "error", Deadline::after(kSureToComeMs)));
        return abort.aborted() ? std::move(record) : std::move(first);
      }
    } else if (auto first = findError()) {
      // A counter elects no rank here: any process that reaches the store can add to it, and then no rank would write. Two ranks may
      // both write; then the later record counts.
      return abort.aborted() ? std::move(record) : *std::move(first);
    }
    const std::string text = record.serialize();
    if (!store.sealed()) {
      store.set(prefix + "error", text);
      return record;
    }
    if (!binding.empty()) {
      store.set(prefix + binding + "error", text);
    }
    if (!self.empty() || binding.empty()) { // for ranks that are not bound, or to another list
      store.set(prefix + "error", self + "\n" + text);
    }
    return record;
  } catch (const std::exception&) {
    return record; // without the store every rank finds out by itself
  }
}

} // namespace pycomm
