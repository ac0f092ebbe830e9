#include "proof/elastic/walk.h"

#include <deque>
#include <memory>
#include <optional>
#include <unordered_set>
#include <utility>

#include "elastic/agreement.h"
#include "elastic/step_ledger.h"

namespace pycomm::elastic::sim {
namespace {

constexpr int kMost = 4;

struct Letter {
  std::shared_ptr<const Message> message;
  uint64_t digest = 0;
};

uint64_t digestOf(const std::string& bytes) {
  uint64_t digest = bytes.size();
  for (size_t at = 0; at < bytes.size(); at += 8) {
    uint64_t word = 0;
    for (size_t i = at; i < bytes.size() && i < at + 8; ++i) {
      word = word << 8 | static_cast<unsigned char>(bytes[i]);
    }
    digest = mixed(digest, word);
  }
  return digest;
}

struct State {
  std::vector<Agreement> agreements;
  std::vector<StepLedger> ledgers;
  std::deque<Letter> letters[kMost][kMost]; ///< from, to
  std::shared_ptr<const Record> records[kMost];
  TimePoint now[kMost];
  int ticks_left[kMost] = {};
  bool sealing[kMost] = {};
  bool sealed[kMost] = {};
  bool promised[kMost] = {};
  bool entered[kMost] = {};
  bool end_seen[kMost] = {}; ///< of the dead one's connections
  bool certificate_seen[kMost] = {};
  bool died = false;
  bool suspected = false;
  uint64_t next = 0; ///< the view that was installed after the first
  uint64_t result = 0; ///< of step 1, where it was committed
  std::string wrong;
  std::shared_ptr<const std::pair<std::string, std::shared_ptr<const void>>> way; ///< the events to here, last first

  [[nodiscard]] uint64_t digest(int processes) const {
    uint64_t digest = mixed(mixed(mixed(next, result), died), suspected);
    for (int p = 0; p < processes; ++p) {
      const auto at = static_cast<size_t>(p);
      const StepState& step = ledgers[at].state();
      digest = mixed(digest, agreements[at].digest());
      digest = mixed(
          digest,
          static_cast<uint64_t>(step.committed) << 12 | static_cast<uint64_t>(ticks_left[p]) << 8 |
              static_cast<uint64_t>(step.launched) << 7 | static_cast<uint64_t>(step.finished) << 6 |
              static_cast<uint64_t>(sealing[p]) << 5 | static_cast<uint64_t>(sealed[p]) << 4 |
              static_cast<uint64_t>(promised[p]) << 3 | static_cast<uint64_t>(entered[p]) << 2 |
              static_cast<uint64_t>(end_seen[p]) << 1 | static_cast<uint64_t>(certificate_seen[p]));
      for (int to = 0; to < processes; ++to) {
        digest = mixed(digest, letters[p][to].size());
        for (const Letter& letter : letters[p][to]) {
          digest = mixed(digest, letter.digest);
        }
      }
    }
    return digest;
  }
};

class Walker {
 public:
  explicit Walker(const Scope& scope) : scope_(scope) {}

  Walked walk() {
    std::vector<std::unique_ptr<State>> open;
    open.push_back(start());
    seen_.insert(open.back()->digest(scope_.processes));
    while (!open.empty()) {
      const std::unique_ptr<State> state = std::move(open.back());
      open.pop_back();
      ++walked_.states;
      if (!state->wrong.empty()) {
        walked_.wrong = state->wrong + wayOf(*state);
        break;
      }
      if (walked_.states > scope_.most_states) {
        walked_.wrong = "more states than allowed";
        break;
      }
      if (!goOn(*state, open)) {
        ++walked_.ends;
        walked_.decided += state->next != 0 ? 1 : 0;
        walked_.committed += state->result == whole_ ? 1 : 0;
      }
    }
    return walked_;
  }

 private:
  std::unique_ptr<State> start() {
    auto state = std::make_unique<State>();
    View first;
    for (int p = 0; p < scope_.processes; ++p) {
      first.members.push_back(idOf(p));
    }
    first_ = first;
    whole_ = resultOf(first);
    for (int p = 0; p < scope_.processes; ++p) {
      Agreement::Config config;
      config.self = idOf(p);
      config.retry_ms = 1'000'000; // nothing is lost, so nothing need be sent again
      config.quorum_wait_ms = 100'000'000;
      state->now[p] = TimePoint(std::chrono::hours(1));
      state->ticks_left[p] = scope_.ticks;
      Agreement& agreement = state->agreements.emplace_back(config, first, state->now[p]);
      StepLedger& ledger = state->ledgers.emplace_back();
      ledger.launch();
      agreement.step(ledger.state());
    }
    for (int p = 0; p < scope_.processes; ++p) {
      act(*state, p);
    }
    return state;
  }

  static Incarnation idOf(int p) {
    return {1, static_cast<uint64_t>(p) + 1};
  }
  static uint64_t resultOf(const View& view) {
    uint64_t digest = 1;
    for (const Incarnation& member : view.members) {
      digest = mixed(digest, member.low);
    }
    return digest;
  }
  [[nodiscard]] static std::string wayOf(const State& state) {
    std::string out;
    for (auto at = state.way; at != nullptr;) {
      out.insert(0, "\n  " + at->first);
      at = std::static_pointer_cast<const std::pair<std::string, std::shared_ptr<const void>>>(at->second);
    }
    return out;
  }

  void commit(State& state, uint64_t result, int p) {
    if (state.result != 0 && state.result != result) {
      state.wrong = "S1: process " + std::to_string(p) + " commits step 1 with other bits than another";
    }
    state.result = result;
  }

  void act(State& state, int p) {
    Agreement& agreement = state.agreements[static_cast<size_t>(p)];
    StepLedger& ledger = state.ledgers[static_cast<size_t>(p)];
    for (Agreement::Action& action : agreement.takeActions()) {
      switch (action.kind) {
        case Agreement::Action::Kind::Send: {
          const uint64_t digest = digestOf(encode(*action.message));
          state.promised[p] = state.promised[p] ||
              (action.message->kind == Message::Kind::Promise && action.message->view == first_.id());
          for (const Incarnation& to : action.to) {
            const int other = static_cast<int>(to.low) - 1;
            if (!(state.died && other == scope_.dies)) {
              state.letters[p][other].push_back({action.message, digest});
            }
          }
          break;
        }
        case Agreement::Action::Kind::Keep:
          state.records[p] = action.record;
          break;
        case Agreement::Action::Kind::Seal:
          state.sealing[p] = true;
          break;
        case Agreement::Action::Kind::Install: {
          if (action.view.epoch == 1) {
            if (state.next != 0 && state.next != action.view.id()) {
              state.wrong = "M1: process " + std::to_string(p) + " installs a second view of epoch 1";
            }
            state.next = action.view.id();
          }
          const StepLedger::Outcome outcome = ledger.install(action.view);
          if (outcome == StepLedger::Outcome::Commit) {
            commit(state, whole_, p);
          } else if (outcome == StepLedger::Outcome::Redo && action.view.epoch == 1) {
            commit(state, resultOf(action.view) ^ 1, p); // as the next epoch will, which is not walked
          }
          state.sealing[p] = state.sealed[p] = false;
          agreement.step(ledger.state());
          break;
        }
        case Agreement::Action::Kind::Link:
        case Agreement::Action::Kind::Raise:
          break;
      }
    }
  }

  template <typename Event>
  void branch(
      const State& from,
      std::vector<std::unique_ptr<State>>& open,
      int p,
      const std::string& what,
      const Event& event) {
    auto next = std::make_unique<State>(from);
    event(*next);
    act(*next, p);
    if (seen_.insert(next->digest(scope_.processes)).second || !next->wrong.empty()) {
      next->way = std::make_shared<const std::pair<std::string, std::shared_ptr<const void>>>(
          "process " + std::to_string(p) + what, from.way);
      open.push_back(std::move(next));
    }
  }

  bool goOn(const State& state, std::vector<std::unique_ptr<State>>& open) {
    bool any = false;
    const int count = scope_.processes;
    const auto alive = [&](int p) { return !(state.died && p == scope_.dies); };
    bool all_entered = true;
    for (int p = 0; p < count; ++p) {
      all_entered = all_entered && state.entered[p];
    }
    for (int p = 0; p < count; ++p) {
      if (!alive(p)) {
        continue;
      }
      const auto at = static_cast<size_t>(p);
      const Agreement& agreement = state.agreements[at];
      const StepState& step = state.ledgers[at].state();
      const auto go = [&](const std::string& what, const auto& event) {
        any = true;
        branch(state, open, p, what, event);
      };
      for (int from = 0; from < count; ++from) {
        if (!state.letters[from][p].empty()) {
          const Letter& letter = state.letters[from][p].front();
          go(" gets kind " + std::to_string(static_cast<int>(letter.message->kind)) + " of " + std::to_string(from),
             [&](State& next) {
               const Letter mine = next.letters[from][p].front();
               next.letters[from][p].pop_front();
               next.agreements[at].received(*mine.message, next.now[p]);
             });
        }
      }
      const bool first_epoch = agreement.view().epoch == 0 && !state.sealed[p] && step.committed == 0;
      if (first_epoch && !step.finished) {
        go(" finishes the bucket", [&](State& next) {
          (void)next.ledgers[at].finish(0);
          next.agreements[at].step(next.ledgers[at].state());
          check(next, p);
        });
      }
      if (first_epoch && step.finished && !state.entered[p]) {
        go(" enters commit", [&](State& next) { next.entered[p] = true; });
      }
      if (first_epoch && all_entered && state.ledgers[at].mayCommit()) {
        go(" commits", [&](State& next) {
          if (next.ledgers[at].commit(0, {}) != StepLedger::Committed::TooLate) {
            commit(next, whole_, p);
            check(next, p);
          }
          next.agreements[at].step(next.ledgers[at].state());
        });
      }
      if (state.sealing[p] && !state.sealed[p]) {
        go(" has sealed", [&](State& next) {
          next.sealed[p] = true;
          next.agreements[at].step(next.ledgers[at].seal());
          next.agreements[at].sealed(next.now[p]);
        });
      }
      const bool silent = scope_.dies >= 0 && state.died && state.letters[scope_.dies][p].empty();
      if (silent && !state.end_seen[p]) {
        go(" sees the end of connections", [&](State& next) {
          next.end_seen[p] = true;
          next.agreements[at].failed(ErrorCode::PeerDead, idOf(scope_.dies), next.now[p]);
        });
      }
      if (silent && scope_.certified && !state.certificate_seen[p]) {
        go(" learns of the end from the kernel", [&](State& next) {
          next.certificate_seen[p] = true;
          next.agreements[at].certified(idOf(scope_.dies), *next.records[scope_.dies], next.now[p]);
        });
      }
      if (p == scope_.suspects && !state.suspected) {
        go(" suspects one that lives", [&](State& next) {
          next.suspected = true;
          next.agreements[at].failed(ErrorCode::PeerDead, idOf(scope_.suspected), next.now[p]);
        });
      }
      if (p == scope_.dies) {
        any = true;
        branch(state, open, p, " dies", [&](State& next) {
          next.died = true;
          for (int from = 0; from < count; ++from) {
            next.letters[from][p].clear();
          }
        });
      }
      const TimePoint tick = agreement.nextTick();
      if (state.ticks_left[p] > 0 && tick < state.now[p] + std::chrono::seconds(900)) {
        go("'s clock goes on", [&](State& next) {
          --next.ticks_left[p];
          next.now[p] = std::max(next.now[p], tick);
          next.agreements[at].tick(next.now[p]);
        });
      }
    }
    return any;
  }

  static void check(State& state, int p) {
    if (state.promised[p]) {
      state.wrong = "M3: an operation ends well on process " + std::to_string(p) + " after its promise";
    }
  }

  const Scope scope_;
  View first_;
  uint64_t whole_ = 0; ///< the result of all members' sum
  std::unordered_set<uint64_t> seen_;
  Walked walked_;
};

} // namespace

Walked walk(const Scope& scope) {
  return Walker(scope).walk();
}

} // namespace pycomm::elastic::sim
