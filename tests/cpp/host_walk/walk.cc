#include "host_walk/walk.h"

#include <cstring>
#include <functional>
#include <utility>

/// _longjmp() by another name, since with _FORTIFY_SOURCE that one takes a jump to another stack for a mistake.
extern "C" [[noreturn]] void pycommWalkJump(jmp_buf to, int value) __asm__("_longjmp");

namespace pycomm::testing {
namespace {

constexpr size_t kStackNbytes = 256 << 10;
constexpr char kAnyWord = 0; ///< its address is what untilOthersWrite() sleeps on

} // namespace

uint64_t mixed(uint64_t hash, uint64_t value) noexcept {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15;
  return hash ^ (hash >> 29);
}

uint64_t mixed(uint64_t hash, const void* bytes, size_t nbytes) noexcept {
  const auto* from = static_cast<const std::byte*>(bytes);
  for (size_t at = 0; at < nbytes; at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, from + at, nbytes - at < sizeof(word) ? nbytes - at : sizeof(word));
    hash = mixed(hash, word);
  }
  return hash;
}

Walk* Walk::current_ = nullptr;

Walk::Walk(Scene& scene, int size, int late) : scene_(scene), ranks_(static_cast<size_t>(size)), late_(late) {
  for (Rank& rank : ranks_) {
    rank.stack.resize(kStackNbytes);
  }
}

void Walk::enter() {
  Walk& walk = current();
  walk.scene_.body(walk.running_);
  walk.now().ended = true;
  walk.now().log = 0;
  walk.swap();
}

void Walk::begin() {
  scene_.reset();
  draining_ = false;
  at_ = path_.size();
  for (size_t i = 0; i < ranks_.size(); ++i) {
    Rank& rank = ranks_[i];
    rank.ended = rank.between = rank.did_nothing = rank.news = rank.begun = false;
    rank.asleep = rank.passing = nullptr;
    rank.ways = 1;
    rank.log = 0;
    rank.what = "begins";
    ::getcontext(&rank.context);
    rank.context.uc_stack.ss_sp = rank.stack.data();
    rank.context.uc_stack.ss_size = rank.stack.size();
    rank.context.uc_link = nullptr;
    ::makecontext(&rank.context, &Walk::enter, 0);
    if (static_cast<int>(i) != late_) {
      go({static_cast<int>(i), 0}); // to its first choice
    }
  }
}

void Walk::swap() {
  if (!draining_ && at_ < path_.size() && path_[at_].rank == running_) { // the fiber would be the next one anyway
    now().chosen = path_[at_++].way;
    return;
  }
  if (_setjmp(now().at) == 0) {
    pycommWalkJump(main_, 1);
  }
}

// Not swapcontext(), which asks the kernel for signal masks twice, and would be a third of the walk.
void Walk::enterRank() noexcept {
  if (_setjmp(main_) == 0) {
    if (std::exchange(now().begun, true)) {
      pycommWalkJump(now().at, 1);
    }
    ::setcontext(&now().context);
  }
}

void Walk::go(Step step) {
  running_ = step.rank;
  now().chosen = step.way;
  if (now().ended) {
    wrong("the way to a state did not lead there again: something but the order decides what is done");
    return;
  }
  enterRank();
}

void Walk::pause(const char* what) {
  if (!draining_) {
    now().what = what;
    now().log = mixed(now().log, 1);
    now().passing = nullptr;
    swap();
  }
}

void Walk::pauseAt(const void* word, const char* what, bool passing) {
  if (!passing) {
    pause(what);
    return;
  }
  Rank& me = now();
  if (me.passing == nullptr || !std::less<>()(me.passing, word)) {
    me.log = mixed(me.log, 3); // another pass than the last one
  }
  me.passing = word;
  me.what = what;
  swap();
}

bool Walk::learn(uint64_t& ranks) noexcept {
  const uint64_t bit = uint64_t{1} << running_;
  return (std::exchange(ranks, ranks | bit) & bit) == 0;
}

void Walk::loads(const void* word) {
  if (draining_) {
    return;
  }
  Use& use = uses_[word];
  learned_ = (learn(use.load) && use.store != 0) || learned_;
}

void Walk::pauseToLoad(const void* word, const char* what, bool passing) {
  loads(word);
  if (!draining_ && (uses_[word].store & ~(uint64_t{1} << running_)) != 0) {
    pauseAt(word, what, passing);
  }
}

void Walk::stores(const void* word) {
  if (draining_) {
    return;
  }
  Use& use = uses_[word];
  learned_ = (learn(use.store) && (use.load | use.store) != 0) || learned_;
}

void Walk::pauseToStore(const void* word, const char* what, bool passing) {
  stores(word);
  if (!draining_ && ((uses_[word].load | uses_[word].store) & ~(uint64_t{1} << running_)) != 0) {
    pauseAt(word, what, passing);
  }
}

int Walk::choose(int ways, uint64_t state) {
  if (draining_) {
    return 0;
  }
  Rank& me = now();
  me.ways = ways;
  me.between = true;
  me.log = state;
  me.passing = nullptr;
  me.what = "goes on";
  if (ways > 1 || (me.did_nothing && !me.news)) {
    swap();
  }
  me.between = me.did_nothing = me.news = false;
  me.ways = 1;
  me.log = mixed(me.log, static_cast<uint64_t>(me.chosen)); // the ways differ before they have written anything
  return std::exchange(me.chosen, 0);
}

void Walk::wrote() noexcept {
  for (Rank& rank : ranks_) {
    rank.news = rank.news || &rank != &now();
    rank.asleep = rank.asleep == &kAnyWord && &rank != &now() ? nullptr : rank.asleep;
  }
}

void Walk::untilOthersWrite() {
  if (!std::exchange(now().news, false)) { // nothing since it looked
    sleep(&kAnyWord);
  }
}

void Walk::sleep(const void* word) {
  if (!draining_) {
    now().asleep = word;
    now().what = "wakes up";
    now().log = mixed(now().log, 2);
    now().passing = nullptr;
    swap();
  }
}

void Walk::wake(const void* word) noexcept {
  for (Rank& rank : ranks_) {
    rank.asleep = rank.asleep == word ? nullptr : rank.asleep;
  }
}

void Walk::wrong(const std::string& what) {
  if (!draining_ && wrong_.empty()) {
    wrong_ = "rank " + std::to_string(running_) + ": " + what;
  }
}

void Walk::drain() {
  draining_ = true;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    if (!ranks_[i].ended) {
      go({static_cast<int>(i), 0});
    }
  }
}

std::vector<Walk::Step> Walk::possible() const {
  std::vector<Step> steps;
  for (size_t next = 0; next < ranks_.size(); ++next) {
    const size_t i = (static_cast<size_t>(running_) + next) % ranks_.size(); // the same one first: fewer swaps
    const Rank& rank = ranks_[i];
    if (rank.ended || rank.asleep != nullptr || !rank.begun) {
      continue;
    }
    if (rank.between && rank.ways == 1 && rank.news) {
      return {
          {static_cast<int>(i),
           0}}; // up to its next pause it does nothing that others can see, so the others' order does not matter
    }
    const bool first = !rank.between || !rank.did_nothing || rank.news;
    for (int way = first ? 0 : 1; way < rank.ways; ++way) {
      steps.push_back({static_cast<int>(i), way});
    }
  }
  if (steps.empty() && late_ >= 0 && !ranks_[static_cast<size_t>(late_)].begun) {
    steps.push_back({late_, 0});
  }
  return steps;
}

uint64_t Walk::hash() const {
  uint64_t hash = scene_.hash();
  for (const Rank& rank : ranks_) {
    const bool news = rank.news && (rank.did_nothing || !rank.between); // else nobody asks for it
    hash = mixed(hash, rank.log);
    hash = mixed(hash, reinterpret_cast<uintptr_t>(rank.passing));
    hash = mixed(
        hash,
        static_cast<uint64_t>(rank.ended) | static_cast<uint64_t>(rank.between) << 1 |
            static_cast<uint64_t>(rank.did_nothing) << 2 | static_cast<uint64_t>(news) << 3 |
            static_cast<uint64_t>(rank.asleep != nullptr) << 4 | static_cast<uint64_t>(rank.begun) << 5 |
            static_cast<uint64_t>(rank.ways) << 8);
  }
  return hash;
}

std::string Walk::told() {
  std::string text;
  begin();
  for (const Step& step : path_) {
    const Rank& rank = ranks_[static_cast<size_t>(step.rank)];
    text += "\n  rank " + std::to_string(step.rank) + " " + rank.what;
    text += step.way > 0 ? " (way " + std::to_string(step.way) + ")" : "";
    go(step);
  }
  drain();
  return text;
}

Walk::Found Walk::all(size_t most) {
  current_ = this;
  uses_.clear();
  Found found;
  do {
    learned_ = false;
    found = allAsFarAsKnown(most);
  } while (learned_);
  current_ = nullptr;
  return found;
}

Walk::Found Walk::allAsFarAsKnown(size_t most) {
  seen_.clear();
  path_.clear();
  Found found;
  std::vector<std::vector<Step>> untried;
  do {
    begin();
    at_ = 0;
    while (at_ < path_.size()) {
      const Step step = path_[at_++];
      go(step);
    }
    for (;;) {
      const std::vector<Step> steps = possible();
      if (steps.empty()) {
        bool all_ended = true;
        for (const Rank& rank : ranks_) {
          all_ended = all_ended && rank.ended;
        }
        if (all_ended) {
          scene_.ended();
        } else {
          wrong("nobody can go on");
        }
        ++found.runs;
      }
      if (learned_ || !wrong_.empty() || steps.empty() || !seen_.insert(hash()).second) {
        break;
      }
      if (seen_.size() > most) {
        wrong("too many states");
        break;
      }
      untried.push_back(steps);
      path_.push_back(steps.front());
      at_ = path_.size();
      go(steps.front());
    }
    drain();
    if (learned_) {
      wrong_.clear(); // it is found again
      break;
    }
    if (!wrong_.empty()) {
      found.wrong = std::exchange(wrong_, {});
      found.wrong += told();
      break;
    }
    while (!untried.empty() && untried.back().size() == 1) {
      untried.pop_back();
      path_.pop_back();
    }
    if (!untried.empty()) {
      untried.back().erase(untried.back().begin());
      path_.back() = untried.back().front();
    }
  } while (!untried.empty());
  found.states = seen_.size();
  return found;
}

} // namespace pycomm::testing
