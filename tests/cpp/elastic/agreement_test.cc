#include "elastic/agreement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <set>
#include <utility>

namespace pycomm::elastic {
namespace {

using Action = Agreement::Action;
using Error = Action::Error;
using std::chrono::milliseconds;

/// Members that exchange messages at once, in order. `down` gets and sends nothing.
struct Group {
  explicit Group(int size, size_t min_ranks = 1, int dead_after_ms = 3000) : founders(static_cast<size_t>(size)) {
    View first;
    for (int i = 0; i < size; ++i) {
      first.members.push_back(idOf(i));
    }
    for (int i = 0; i < size; ++i) {
      Agreement::Config config;
      config.self = idOf(i);
      config.min_ranks = min_ranks;
      config.dead_after_ms = dead_after_ms;
      members.emplace_back(config, first, now);
    }
    installed.resize(members.size());
    raised.resize(members.size());
    down.resize(members.size());
    records.resize(members.size());
    run();
  }

  static Incarnation idOf(int i) {
    return {42, static_cast<uint64_t>(i) + 1};
  }

  /// So many processes more ask the founders to admit them.
  void join(int count) {
    for (int i = 0; i < count; ++i) {
      Agreement::Config config;
      config.self = idOf(static_cast<int>(members.size()));
      std::vector<Incarnation> contacts;
      for (size_t member = 0; member < founders; ++member) {
        contacts.push_back(idOf(static_cast<int>(member)));
      }
      members.emplace_back(config, std::move(contacts), now);
      installed.emplace_back();
      raised.emplace_back();
      down.push_back(false);
      records.emplace_back();
    }
    run();
  }
  /// The founders have committed this step, and stop for newcomers.
  void stop(int64_t step) {
    for (size_t i = 0; i < founders; ++i) {
      members[i].step({step, false, false});
      members[i].boundary(now);
    }
    run();
  }
  /// A newcomer holds what the founders do, and says so with its next word.
  void load(size_t newcomer, int64_t step) {
    members[newcomer].loaded(step, members[0].view().id(), now);
  }

  /// Until nothing happens any more.
  void run() {
    for (bool again = true; again;) {
      again = false;
      for (size_t i = 0; i < members.size(); ++i) {
        for (Action& action : members[i].takeActions()) {
          again = true;
          act(i, action);
        }
      }
    }
  }
  void act(size_t i, Action& action) {
    switch (action.kind) {
      case Action::Kind::Send:
        if (stops_after && stops_after->first == i && stops_after->second-- == 0) {
          down[i] = true;
        }
        if (ends_at_accept && action.message->kind == Message::Kind::Accept) {
          const size_t ends = *std::exchange(ends_at_accept, std::nullopt);
          down[ends] = true;
          if (certified_then) {
            members[1].certified(idOf(static_cast<int>(ends)), records[ends], now);
          }
        }
        for (const Incarnation& to : action.to) {
          const size_t at = to.low - 1;
          if (at < members.size() && !down[i] && !down[at] && cut.count(std::minmax(i, at)) == 0) {
            members[at].received(*action.message, now);
          }
        }
        return;
      case Action::Kind::Keep:
        records[i] = *action.record;
        return;
      case Action::Kind::Seal:
        if (seals) {
          members[i].sealed(now);
        }
        return;
      case Action::Kind::Install:
        installed[i].push_back(action.view);
        return;
      case Action::Kind::Raise:
        raised[i] = action;
        return;
      case Action::Kind::Link:
        members[i].linked(action.of, now);
        return;
    }
  }
  void pass(int ms) {
    const TimePoint end = now + milliseconds(ms);
    for (; now < end; now += milliseconds(10)) {
      for (size_t i = 0; i < members.size(); ++i) {
        if (!down[i] && members[i].nextTick() <= now) {
          members[i].tick(now);
        }
      }
      run();
    }
  }

  TimePoint now{std::chrono::hours(1)};
  std::deque<Agreement> members;
  std::vector<std::vector<View>> installed;
  std::vector<std::optional<Action>> raised;
  std::vector<bool> down;
  std::set<std::pair<size_t, size_t>> cut; ///< nothing passes between these, the lower one first
  std::vector<Record> records;
  const size_t founders;
  std::optional<size_t> ends_at_accept; ///< this one does as the first view is proposed
  bool certified_then = false; ///< and member 1 knows at once
  std::optional<std::pair<size_t, int>> stops_after; ///< this member, behind so many messages
  bool seals = true;
};

std::vector<Incarnation> ids(std::initializer_list<int> members) {
  std::vector<Incarnation> found;
  for (const int member : members) {
    found.push_back(Group::idOf(member));
  }
  return found;
}

TEST(Agreement, WaitsForAQuorumForAnyTime) {
  Agreement::Config config;
  config.self = Group::idOf(0);
  config.quorum_wait_ms = 2'000'000'000;
  View alone;
  alone.members = {config.self};
  const Agreement agreement(config, alone, TimePoint());
  EXPECT_EQ(agreement.longestWait(), std::chrono::milliseconds(6'000'000'000));
}

TEST(Agreement, SurvivorsOfADeathInstallOneViewAtOnce) {
  Group group(5);
  group.down[0] = true;
  for (int i = 1; i < 5; ++i) {
    group.members[static_cast<size_t>(i)].failed(ErrorCode::PeerDead, Group::idOf(0), group.now);
  }
  group.run();
  group.pass(150); // another host's end of a connection is no proof: it has a moment to answer
  for (size_t i = 1; i < 5; ++i) {
    ASSERT_EQ(group.installed[i].size(), 1U) << i;
    EXPECT_EQ(group.installed[i][0].members, ids({1, 2, 3, 4}));
    EXPECT_EQ(group.installed[i][0].cause, ErrorCode::PeerDead);
    EXPECT_EQ(group.installed[i][0].epoch, 1U);
  }
}

// One report ends a group. Of each other member that is silent, too, only some of those that live know: its neighbours in that group.
TEST(Agreement, WhomAnyMemberFindsSilentIsWaitedForByNobody) {
  const std::set<size_t> distances = {1, 2, 4, 8, 10, 11};
  for (const size_t first : {0U, 8U}) {
    Group group(12);
    const auto is_silent = [&](size_t i) { return i >= first && i < first + 4; };
    std::vector<Incarnation> left;
    for (size_t i = 0; i < 12; ++i) {
      group.down[i] = is_silent(i);
      if (!is_silent(i)) {
        left.push_back(Group::idOf(static_cast<int>(i)));
      }
    }
    for (size_t silent = first; silent < first + 4; ++silent) {
      for (size_t i = 0; i < 12; ++i) {
        if (!is_silent(i) && (silent == first || distances.count((i + 12 - silent) % 12) != 0)) {
          group.members[i].failed(ErrorCode::PeerUnresponsive, Group::idOf(static_cast<int>(silent)), group.now);
        }
      }
      group.run();
    }
    group.pass(400);
    for (size_t i = 0; i < 12; ++i) {
      ASSERT_EQ(group.installed[i].size(), is_silent(i) ? 0U : 1U) << i;
      EXPECT_TRUE(is_silent(i) || group.installed[i][0].members == left);
    }
  }
}

TEST(Agreement, WithoutAMemberSomethingElseIsDoneAtOnceIfTheKernelSaysThatItHasEnded) {
  Group group(2);
  group.down[0] = true;
  group.members[1].certified(Group::idOf(0), group.records[0], group.now);
  group.run();
  ASSERT_EQ(group.installed[1].size(), 1U); // the half without the lowest, alone, and without waiting
  EXPECT_EQ(group.installed[1][0].members, ids({1}));
}

TEST(Agreement, WithoutACertificateTheHalfWithoutTheLowestLosesItsQuorum) {
  Group group(2);
  group.down[0] = true;
  group.members[1].failed(ErrorCode::PeerDead, Group::idOf(0), group.now);
  group.run();
  group.pass(9900);
  EXPECT_TRUE(group.installed[1].empty());
  EXPECT_FALSE(group.raised[1]);
  group.pass(200);
  ASSERT_TRUE(group.raised[1]);
  EXPECT_EQ(group.raised[1]->error, Error::QuorumLost);
  EXPECT_EQ(group.raised[1]->missing, ids({0}));
}

// One that was stopped while the other finished alone, and ended.
TEST(Agreement, TheRecordOfADeadProcessSaysThatThisOneWasLeftBehind) {
  Group group(2);
  group.down[1] = true;
  group.members[0].failed(ErrorCode::PeerUnresponsive, Group::idOf(1), group.now);
  group.run();
  group.pass(150);
  ASSERT_EQ(group.installed[0].size(), 1U);
  group.down[0] = true;
  group.down[1] = false;
  group.members[1].certified(Group::idOf(0), group.records[0], group.now);
  group.run();
  group.pass(11000);
  EXPECT_TRUE(group.installed[1].empty());
  ASSERT_TRUE(group.raised[1]);
  EXPECT_EQ(group.raised[1]->error, Error::LeftBehind);
}

// Another one that the decision did not reach learns it from the record.
TEST(Agreement, TheRecordOfADeadProcessSaysWhatWasDecided) {
  Group group(3);
  View next;
  next.epoch = 1;
  next.parent = group.members[0].view().id();
  next.members = ids({0, 1});
  Record record;
  record.view = next;
  record.past = {group.members[0].view()};
  group.members[1].certified(Group::idOf(0), record, group.now);
  group.run();
  ASSERT_FALSE(group.installed[1].empty());
  EXPECT_EQ(group.installed[1][0], next);
}

TEST(Agreement, AGoodbyeSaysWhatWasAccepted) {
  Group group(3);
  Message accept;
  accept.kind = Message::Kind::Accept;
  accept.from = Group::idOf(0);
  accept.view = group.members[1].view().id();
  accept.ballot = Ballot(0, 1, 0);
  accept.next.emplace();
  accept.next->epoch = 1;
  accept.next->parent = accept.view;
  accept.next->members = ids({0, 1});
  group.down = {true, true, true};
  group.members[1].received(accept, group.now);
  EXPECT_EQ(group.members[1].takeActions().empty(), false);
  group.members[1].close(group.now);
  const std::vector<Action> actions = group.members[1].takeActions();
  ASSERT_EQ(actions.size(), 1U);
  EXPECT_EQ(actions[0].message->kind, Message::Kind::Goodbye);
  EXPECT_EQ(actions[0].message->accepted, (Accepted{accept.ballot, *accept.next}));
  // The one that gets it, and the certificate of the other, proposes that and nothing else.
  group.down[2] = false;
  group.members[2].received(*actions[0].message, group.now);
  group.members[2].certified(Group::idOf(0), Record{group.members[2].view(), std::nullopt, {}}, group.now);
  group.run();
  group.pass(200);
  EXPECT_TRUE(group.installed[2].empty());
  ASSERT_TRUE(group.raised[2]);
  EXPECT_EQ(group.raised[2]->error, Error::LeftBehind);
}

// It has left an epoch that this one has not come to, so what it had accepted in this one is not known.
TEST(Agreement, AGoodbyeOfALaterEpochDoesNotCountItsSenderOut) {
  Group group(2);
  group.down[0] = true;
  Message goodbye;
  goodbye.kind = Message::Kind::Goodbye;
  goodbye.from = Group::idOf(0);
  goodbye.epoch = 2;
  goodbye.next.emplace();
  goodbye.next->epoch = 2;
  goodbye.next->members = ids({0, 1});
  goodbye.view = goodbye.next->id();
  group.members[1].received(goodbye, group.now);
  group.members[1].failed(ErrorCode::PeerDead, Group::idOf(0), group.now);
  group.run();
  group.pass(10100);
  EXPECT_TRUE(group.installed[1].empty());
  ASSERT_TRUE(group.raised[1]);
  EXPECT_EQ(group.raised[1]->error, Error::QuorumLost);
}

TEST(Agreement, ASmallerBallotThanThePromisedOneIsNeitherPromisedNorAccepted) {
  Group group(3);
  Message prepare;
  prepare.kind = Message::Kind::Prepare;
  prepare.from = Group::idOf(1);
  prepare.view = group.members[2].view().id();
  prepare.cause = ErrorCode::PeerUnresponsive;
  prepare.ballot = Ballot(0, 5, 1);
  group.members[2].received(prepare, group.now);
  (void)group.members[2].takeActions();
  Message accept = prepare;
  accept.from = Group::idOf(0);
  accept.ballot = Ballot(0, 4, 0);
  accept.next.emplace();
  accept.next->epoch = 1;
  accept.next->parent = accept.view;
  for (const Message::Kind kind : {Message::Kind::Prepare, Message::Kind::Accept}) {
    accept.kind = kind;
    group.members[2].received(accept, group.now);
    const std::vector<Action> actions = group.members[2].takeActions();
    ASSERT_EQ(actions.size(), 1U);
    ASSERT_EQ(actions[0].kind, Action::Kind::Send);
    EXPECT_EQ(actions[0].message->kind, Message::Kind::Refuse);
    EXPECT_EQ(actions[0].message->ballot, prepare.ballot);
  }
}

TEST(Agreement, AViewThatDoesNotFollowIsNotLearned) {
  Group group(3);
  Message decide;
  decide.kind = Message::Kind::Decide;
  decide.from = Group::idOf(1);
  decide.view = group.members[0].view().id();
  decide.next.emplace();
  decide.next->members = ids({0, 1});
  for (const uint64_t epoch : {0, 1, 2}) {
    for (const uint64_t parent : {decide.view + 1, decide.view}) {
      decide.next->epoch = epoch;
      decide.next->parent = parent;
      group.members[0].received(decide, group.now);
      EXPECT_EQ(group.members[0].view().epoch, epoch == 1 && parent == decide.view ? 1U : 0U);
      if (group.members[0].view().epoch == 1) {
        return;
      }
    }
  }
  FAIL() << "nothing was learned";
}

TEST(Agreement, APongOfAnEarlierEpochDoesNotCount) {
  Group group(3);
  Agreement& member = group.members[2];
  Message message;
  message.kind = Message::Kind::Prepare;
  message.from = Group::idOf(0);
  message.view = member.view().id();
  message.cause = ErrorCode::ConnectionReset;
  message.ballot = Ballot(0, 1, 0);
  member.received(message, group.now);
  uint64_t nonce = 0;
  for (const Action& action : member.takeActions()) {
    if (action.kind == Action::Kind::Send && action.message->kind == Message::Kind::Ping) {
      nonce = action.message->nonce;
    }
  }
  message.kind = Message::Kind::Pong;
  message.nonce = nonce;
  member.received(message, group.now);
  message.from = Group::idOf(1);
  message.nonce = nonce - 1;
  member.received(message, group.now);
  member.sealed(group.now);
  std::optional<MemberSet> reach;
  for (int ms = 0; ms < 5000; ms += 100) {
    member.tick(group.now + milliseconds(ms));
    for (const Action& action : member.takeActions()) {
      if (action.kind == Action::Kind::Send && action.message->kind == Message::Kind::Promise) {
        reach = action.message->reach;
      }
    }
  }
  EXPECT_EQ(reach, MemberSet(0b101));
}

TEST(Agreement, NothingIsPromisedBeforeTheSeal) {
  Group group(3);
  group.seals = false;
  group.down[2] = true;
  group.members[0].failed(ErrorCode::PeerDead, Group::idOf(2), group.now);
  group.run();
  group.pass(1000);
  EXPECT_TRUE(group.installed[0].empty());
  group.members[0].sealed(group.now);
  group.members[1].sealed(group.now);
  group.run();
  EXPECT_EQ(group.installed[0].size(), 1U);
  EXPECT_EQ(group.installed[1].size(), 1U);
}

// The others suspect a process that closes, before its goodbye comes: it has closed its group.
TEST(Agreement, AMemberThatClosesLeavesNobodyBehind) {
  Group group(2);
  group.members[1].retire();
  group.members[0].failed(ErrorCode::PeerLeft, Group::idOf(1), group.now);
  group.run();
  group.pass(500);
  group.members[1].close(group.now);
  group.run();
  group.pass(500);
  EXPECT_FALSE(group.raised[0]);
  ASSERT_EQ(group.installed[0].size(), 1U);
  EXPECT_EQ(group.installed[0][0].members, ids({0}));
}

// Its last step is committed; the others have not agreed on the next members when it closes.
TEST(Agreement, AMemberThatClosesBehindItsLastStepHasLeft) {
  Group group(3);
  group.members[0].leave();
  group.members[0].retire();
  for (Agreement& member : group.members) {
    member.step({1, false, false});
    member.boundary(group.now);
  }
  group.run();
  group.pass(500);
  ASSERT_EQ(group.installed[1].size(), 1U);
  EXPECT_EQ(group.installed[1][0].members, ids({1, 2}));
  EXPECT_TRUE(group.installed[1][0].left.test(0));
}

TEST(Agreement, AProposerThatSealsLastIsAMember) {
  Group group(5);
  group.seals = false;
  group.down[4] = true;
  group.members[0].failed(ErrorCode::PeerDead, Group::idOf(4), group.now);
  group.run();
  for (size_t i = 1; i < 4; ++i) {
    group.members[i].sealed(group.now);
  }
  group.run();
  group.pass(500);
  EXPECT_TRUE(group.installed[1].empty());
  group.members[0].sealed(group.now);
  group.run();
  for (size_t i = 0; i < 4; ++i) {
    ASSERT_EQ(group.installed[i].size(), 1U);
    EXPECT_EQ(group.installed[i][0].members, ids({0, 1, 2, 3}));
  }
}

TEST(Agreement, ABrokenConnectionTriesTheSameMembersAgainTwice) {
  Group group(3);
  for (size_t times = 1; times <= 2; ++times) {
    group.members[0].failed(ErrorCode::ConnectionReset, Group::idOf(2), group.now);
    group.members[2].failed(ErrorCode::ConnectionReset, Group::idOf(0), group.now);
    group.run();
    group.pass(5000);
    ASSERT_EQ(group.installed[1].size(), times);
    EXPECT_EQ(group.installed[1].back().members, times == 1 ? ids({0, 1, 2}) : ids({0, 1}));
  }
  EXPECT_EQ(group.raised[2]->error, Error::LeftBehind);
}

// One member may notice a broken connection after another has told it that the epoch is over.
TEST(Agreement, AConnectionThatBreaksWhileMembersAgreeEndsNoLaterEpoch) {
  for (const bool answered : {false, true}) {
    Group group(2);
    group.seals = false;
    group.members[1].failed(ErrorCode::ConnectionReset, Group::idOf(0), group.now);
    if (answered) {
      group.run(); // member 0 has the pong of member 1
    } else {
      for (Action& action : group.members[1].takeActions()) {
        group.act(1, action); // member 0 agrees
      }
    }
    group.members[0].failed(ErrorCode::ConnectionReset, Group::idOf(1), group.now);
    group.run();
    for (Agreement& member : group.members) {
      member.sealed(group.now);
    }
    group.run();
    for (const std::vector<View>& installed : group.installed) {
      ASSERT_EQ(installed.size(), 1U);
      EXPECT_EQ(installed.back().members, ids({0, 1}));
    }
    for (const Agreement& member : group.members) {
      EXPECT_TRUE(member.mayBegin());
    }
  }
}

// Links between processes may break after the end of one was seen.
TEST(Agreement, ABrokenConnectionDoesNotMakeADeathDoubtful) {
  Group group(2);
  group.down[1] = true;
  group.members[0].failed(ErrorCode::PeerDead, Group::idOf(1), group.now);
  group.members[0].failed(ErrorCode::ConnectionReset, Group::idOf(1), group.now);
  group.run();
  group.pass(150);
  ASSERT_EQ(group.installed[0].size(), 1U);
  EXPECT_EQ(group.installed[0][0].members, ids({0}));
}

// Nothing passes from the others to the lowest, so it gets no promise. What it sends arrives.
TEST(Agreement, AProposerThatThisProcessCannotReachIsNotWaitedFor) {
  Group group(3);
  Message suspect;
  suspect.kind = Message::Kind::Suspect;
  suspect.from = Group::idOf(0);
  suspect.view = group.members[1].view().id();
  suspect.cause = ErrorCode::PeerUnresponsive;
  group.down[0] = true;
  for (int i = 1; i < 3; ++i) {
    suspect.culprit = Group::idOf(i);
    group.members[static_cast<size_t>(i)].received(suspect, group.now);
  }
  Message prepare = suspect;
  prepare.kind = Message::Kind::Prepare;
  prepare.culprit.reset();
  prepare.ballot = Ballot(0, 1, 0);
  for (size_t i = 1; i < 3; ++i) {
    group.members[i].received(prepare, group.now);
  }
  group.run();
  group.pass(1500);
  for (size_t i = 1; i < 3; ++i) {
    ASSERT_EQ(group.installed[i].size(), 1U);
    EXPECT_EQ(group.installed[i][0].members, ids({1, 2}));
  }
}

TEST(Agreement, WhoIsFoundSilentDuringTheAgreementIsNotifiedAtOnce) {
  Group group(3);
  group.down = {true, true, true};
  group.members[1].failed(ErrorCode::ConnectionReset, Group::idOf(0), group.now);
  (void)group.members[1].takeActions();
  group.members[1].failed(ErrorCode::PeerUnresponsive, Group::idOf(2), group.now);
  bool told = false;
  for (const Action& action : group.members[1].takeActions()) {
    told = told ||
        (action.kind == Action::Kind::Send && std::count(action.to.begin(), action.to.end(), Group::idOf(2)) == 1 &&
         action.message->kind == Message::Kind::Suspect && action.message->culprit == Group::idOf(2));
  }
  EXPECT_TRUE(told);
}

// Each member waits for a pong of the second one, whose silence nobody has reported, and promises after that.
TEST(Agreement, TwoThatFallSilentAtOnceTakeNobodyWithThem) {
  Group group(6);
  group.down[4] = group.down[5] = true;
  group.members[1].failed(ErrorCode::PeerUnresponsive, Group::idOf(4), group.now);
  group.pass(6000);
  for (size_t i = 0; i < 4; ++i) {
    ASSERT_EQ(group.installed[i].size(), 1) << i;
    EXPECT_EQ(group.installed[i][0].members, ids({0, 1, 2, 3}));
  }
}

// Each of the two waits for the other one's pong.
// A member that has answered the first questions of an agreement, and then stops, is reported by nobody: its silence is waited for. With
// default times that takes longer than quorum_wait for the members behind many dead ones, which propose late.
TEST(Agreement, AMemberThatStopsRightAfterADeathCostsALivingQuorumNothing) {
  for (const bool certified : {true, false}) {
    for (int size = 4; size <= 8; ++size) {
      for (int dead = 1; dead < size; ++dead) {
        const int base = certified ? size - dead : size;
        if (2 * (size - dead - 1) <= base) {
          continue;
        }
        for (int stopped = dead; stopped < size; ++stopped) {
          for (int messages = 0; messages < 12; ++messages) {
            SCOPED_TRACE(
                std::to_string(dead) + (certified ? " certified" : "") + " of " + std::to_string(size) + ", then " +
                std::to_string(stopped) + " after " + std::to_string(messages));
            Group group(size);
            group.stops_after = {static_cast<size_t>(stopped), messages};
            for (int i = 0; i < dead; ++i) {
              group.down[static_cast<size_t>(i)] = true;
            }
            for (int member = dead; member < size; ++member) {
              for (int i = 0; i < dead; ++i) {
                Agreement& at = group.members[static_cast<size_t>(member)];
                if (certified) {
                  at.certified(Group::idOf(i), group.records[static_cast<size_t>(i)], group.now);
                } else {
                  at.failed(ErrorCode::PeerDead, Group::idOf(i), group.now);
                }
              }
            }
            group.run();
            const auto all_installed = [&] {
              for (int member = dead; member < size; ++member) {
                if (member != stopped && group.installed[static_cast<size_t>(member)].empty()) {
                  return false;
                }
              }
              return true;
            };
            for (int ms = 0; ms < 15000 && !all_installed(); ms += 50) {
              group.pass(50);
            }
            ASSERT_TRUE(all_installed());
            for (int member = dead; member < size; ++member) {
              ASSERT_FALSE(member != stopped && group.raised[static_cast<size_t>(member)]) << member;
            }
          }
        }
      }
    }
  }
}

// They reach each other, and yet the agreement does not end: a seal does not come.
TEST(Agreement, AQuorumThatDoesNotAgreeRaisesInTheEnd) {
  Group group(3);
  group.seals = false;
  group.down[2] = true;
  group.members[0].failed(ErrorCode::PeerDead, Group::idOf(2), group.now);
  group.run();
  group.pass(29900);
  EXPECT_FALSE(group.raised[0]);
  group.pass(200);
  ASSERT_TRUE(group.raised[0]);
  EXPECT_EQ(group.raised[0]->error, Error::QuorumLost);
  EXPECT_EQ(group.raised[0]->missing, ids({2}));
}

TEST(Agreement, ALongPauseThatIsShorterThanASilenceCostsALivingQuorumNothing) {
  Group group(3, 1, 60'000);
  group.down[1] = group.down[2] = true;
  group.members[0].certified(Group::idOf(2), group.records[2], group.now);
  group.pass(35'000);
  group.down[1] = false;
  group.pass(40'000);
  EXPECT_FALSE(group.raised[0]);
  ASSERT_EQ(group.installed[0].size(), 1U);
  EXPECT_EQ(group.installed[0][0].members, ids({0, 1}));
}

// Rank 1 has answered, and is found silent later: with rank 2, which has not, too many are gone.
TEST(Agreement, AMemberThatAnsweredAndFellSilentCountsForNoQuorum) {
  Group group(3);
  group.down[2] = true;
  group.seals = false;
  group.members[0].failed(ErrorCode::PeerDead, Group::idOf(2), group.now);
  group.run();
  group.down[1] = true;
  group.members[0].failed(ErrorCode::PeerUnresponsive, Group::idOf(1), group.now);
  group.run();
  group.pass(10100);
  ASSERT_TRUE(group.raised[0]);
  EXPECT_EQ(group.raised[0]->error, Error::QuorumLost);
  EXPECT_EQ(group.raised[0]->missing, ids({1, 2}));
}

TEST(Agreement, AWireBetweenTwoMembersCostsOneOfThem) {
  Group group(4);
  group.cut.insert({1, 2});
  group.members[0].failed(ErrorCode::ConnectionReset, Group::idOf(3), group.now);
  group.pass(6000);
  ASSERT_EQ(group.installed[0].size(), 1);
  EXPECT_EQ(group.installed[0][0].members, ids({0, 1, 3}));
  ASSERT_TRUE(group.raised[2]);
  EXPECT_EQ(group.raised[2]->error, Error::LeftBehind);
}

TEST(Agreement, ProgramErrorsChangeNoMembers) {
  for (int code = 0; code < 60; ++code) {
    const auto error = static_cast<ErrorCode>(code);
    const bool changes = error == ErrorCode::PeerDead || error == ErrorCode::PeerUnresponsive ||
        error == ErrorCode::PeerLeft || error == ErrorCode::ConnectionReset;
    EXPECT_EQ(Agreement::changesMembers(error), changes) << code;
    Group group(2);
    group.members[0].failed(error, Group::idOf(1), group.now);
    EXPECT_EQ(group.members[0].takeActions().empty(), !changes) << code;
  }
}

TEST(Agreement, AStepThatAllHaveFinishedIsCommittedBeforeTheErrorThatTheyAreTooFew) {
  Group group(2, 2);
  group.members[1].step({4, true, true});
  group.down[0] = true;
  group.members[1].certified(Group::idOf(0), group.records[0], group.now);
  group.run();
  ASSERT_EQ(group.installed[1].size(), 1U);
  EXPECT_EQ(group.installed[1][0].step, 5);
  EXPECT_FALSE(group.members[1].mayBegin());
  EXPECT_FALSE(group.raised[1]); // a newcomer may come
  group.pass(10100);
  ASSERT_TRUE(group.raised[1]);
  EXPECT_EQ(group.raised[1]->error, Error::TooFew);
}

// A network that was cut for minutes, of one member only. The others keep the last views, of which none follows its own.
TEST(Agreement, WhoAsksInAnEpochOfLongAgoIsNotified) {
  Group group(3);
  group.down[2] = true;
  for (size_t i = 0; i < 2; ++i) {
    group.members[i].certified(Group::idOf(2), group.records[2], group.now);
  }
  group.run();
  for (int64_t step = 1; step <= static_cast<int64_t>(kMaxPast) + 1; ++step) {
    for (size_t i = 0; i < 2; ++i) {
      group.members[i].step({step, false, false});
      group.members[i].boundary(group.now);
    }
    group.run();
  }
  ASSERT_EQ(group.members[1].view().epoch, kMaxPast + 2);
  group.down[2] = false;
  group.members[2].failed(ErrorCode::ConnectionReset, Group::idOf(1), group.now); // so it asks
  group.run();
  ASSERT_TRUE(group.raised[2]);
  EXPECT_EQ(group.raised[2]->error, Error::LeftBehind);
}

TEST(Agreement, AMemberLeavesAtACommitAndNobodyWaits) {
  Group group(3);
  group.members[0].leave();
  for (size_t i = 0; i < 3; ++i) {
    group.members[i].step({1, false, false});
    group.members[i].boundary(group.now);
  }
  group.run();
  ASSERT_EQ(group.installed[1].size(), 1U);
  EXPECT_EQ(group.installed[1][0].members, ids({1, 2}));
  EXPECT_EQ(group.installed[1][0].left, MemberSet(0b1));
  EXPECT_EQ(group.installed[2], group.installed[1]);
  ASSERT_TRUE(group.raised[0]);
  EXPECT_EQ(group.raised[0]->error, Error::Left);
}

TEST(Agreement, ANewcomerIsAdmittedBehindOnceItHasLoaded) {
  Group group(2);
  group.join(1);
  group.pass(50);
  EXPECT_TRUE(group.members[0].admits());
  group.stop(1);
  EXPECT_EQ(group.members[0].loading(), ids({2}));
  EXPECT_TRUE(group.installed[0].empty());
  group.load(2, 1);
  group.pass(50);
  for (size_t i = 0; i < 3; ++i) {
    ASSERT_EQ(group.installed[i].size(), 1U) << i;
    EXPECT_EQ(group.installed[i][0].members, ids({0, 1, 2}));
    EXPECT_EQ(group.installed[i][0].step, 1);
  }
}

TEST(Agreement, TwoNewcomersAreAdmittedInOneStop) {
  Group group(2);
  group.join(2);
  group.pass(4000);
  group.stop(1);
  EXPECT_EQ(group.members[0].loading(), ids({2, 3}));
  group.load(2, 1);
  group.load(3, 1);
  group.pass(50);
  for (size_t i = 0; i < 4; ++i) {
    ASSERT_EQ(group.installed[i].size(), 1U) << i;
    EXPECT_EQ(group.installed[i][0].members, ids({0, 1, 2, 3}));
  }
}

TEST(Agreement, OneOfTwoNewcomersThatEndsKeepsTheOtherOneWaitingForLessThanTheProposer) {
  Group group(2);
  group.join(2);
  group.pass(4000);
  group.stop(1);
  group.load(3, 1);
  group.pass(250); // which its next word says
  group.down[3] = true;
  group.load(2, 1);
  group.pass(1500);
  for (size_t i = 0; i < 3; ++i) {
    ASSERT_EQ(group.installed[i].size(), 1U) << i;
    EXPECT_EQ(group.installed[i][0].members, ids({0, 1, 2}));
  }
}

// Rank 0 gives the state to those that it has found when the members stopped, and to nobody else.
TEST(Agreement, ANewcomerThatIsReachedDuringAPauseIsNotWaitedForAndIsTheNextOne) {
  Group group(2);
  group.join(1);
  group.pass(50);
  group.stop(1);
  EXPECT_EQ(group.members[0].loading(), ids({2}));
  group.join(1);
  group.pass(50);
  EXPECT_EQ(group.members[0].loading(), ids({2}));
  group.load(2, 1);
  group.pass(50);
  ASSERT_EQ(group.installed[0].size(), 1U);
  EXPECT_EQ(group.installed[0][0].members, ids({0, 1, 2}));
  group.pass(300); // it asks again
  EXPECT_TRUE(group.members[0].admits()); // at once: nobody has waited for it
  for (size_t i = 0; i < 3; ++i) {
    group.members[i].step({2, false, false});
    group.members[i].boundary(group.now);
  }
  group.run();
  EXPECT_EQ(group.members[0].loading(), ids({3}));
}

// Rank 0 gives nobody a state any more once it waits for its step to begin.
TEST(Agreement, TooFewMembersGoOnWithTheNewcomersThatHaveLoadedIfTheySuffice) {
  for (const size_t min_ranks : {2U, 3U}) {
    Group group(1, min_ranks);
    group.join(1);
    group.pass(50);
    EXPECT_EQ(group.members[0].loading(), ids({1}));
    group.join(1);
    group.pass(50);
    EXPECT_EQ(group.members[0].loading(), ids({1, 2}));
    group.load(1, 0);
    group.pass(250);
    ASSERT_EQ(group.installed[0].size(), min_ranks == 2 ? 1U : 0U);
    group.load(2, 0);
    group.pass(250);
    if (min_ranks == 2) {
      EXPECT_EQ(group.installed[0][0].members, ids({0, 1}));
      EXPECT_TRUE(group.members[0].admits()); // at once: nobody has waited for it
    } else {
      ASSERT_EQ(group.installed[0].size(), 1U); // all together
      EXPECT_EQ(group.installed[0][0].members, ids({0, 1, 2}));
    }
  }
}

/// Of three, of which three are needed, the last one has ended.
void becomeTooFew(Group& group) {
  group.down[2] = true;
  for (const size_t i : {0U, 1U}) {
    group.members[i].certified(Group::idOf(2), group.records[2], group.now);
  }
  group.run();
  ASSERT_EQ(group.installed[1].size(), 1U);
}

TEST(Agreement, TooFewRaiseWhenTheirTimeIsOutAlsoIfOneIsFaster) {
  Group group(3, 3);
  becomeTooFew(group);
  group.pass(9990);
  EXPECT_FALSE(group.raised[0] || group.raised[1]);
  group.now += milliseconds(20);
  group.members[0].tick(group.now);
  ASSERT_TRUE(group.members[0].nextTick() == TimePoint::max()); // it has raised, and says goodbye
  group.run();
  group.pass(50);
  ASSERT_TRUE(group.raised[1]);
  EXPECT_EQ(group.raised[1]->error, Error::TooFew);
}

TEST(Agreement, AConnectionThatBreaksGivesTooFewNoMoreTime) {
  Group group(3, 3);
  becomeTooFew(group);
  group.pass(6000);
  group.members[0].failed(ErrorCode::ConnectionReset, Group::idOf(1), group.now);
  group.run();
  group.pass(1000);
  ASSERT_EQ(group.installed[0].size(), 2U);
  group.pass(2900);
  EXPECT_FALSE(group.raised[0] || group.raised[1]);
  group.pass(200);
  ASSERT_TRUE(group.raised[0] && group.raised[1]);
  EXPECT_EQ(group.raised[0]->error, Error::TooFew);
}

TEST(Agreement, ANewcomerThatOnlyOneOfTooFewReachesGivesThemNoMoreTime) {
  Group group(3, 3);
  group.cut.insert({1, 3});
  becomeTooFew(group);
  group.members[0].awaitStep(true);
  group.join(1);
  for (int ms = 0; ms < 10'100; ms += 100) {
    EXPECT_FALSE(group.raised[1] && ms < 9900) << ms;
    group.load(3, group.members[0].view().step);
    group.pass(100);
  }
  ASSERT_TRUE(group.raised[1]);
  EXPECT_GE(group.installed[1].size(), 3U); // else the test would notice nothing
  group.pass(10'000); // join_pause, as the other one waits for the newcomer
  ASSERT_TRUE(group.raised[0]);
  EXPECT_EQ(group.raised[0]->error, Error::TooFew);
}

TEST(Agreement, TooFewWaitForAStateThatIsOnItsWayForSoLongAsAPause) {
  for (const bool comes : {true, false}) {
    Group group(2, 2);
    group.down[1] = true;
    group.members[0].certified(Group::idOf(1), group.records[1], group.now);
    group.run();
    group.pass(6000);
    group.join(1);
    group.pass(13'900);
    EXPECT_FALSE(group.raised[0]);
    if (comes) {
      group.load(2, 0);
    }
    group.pass(300);
    EXPECT_EQ(group.raised[0].has_value(), !comes);
    EXPECT_EQ(group.installed[0].size(), comes ? 2U : 1U);
  }
}

TEST(Agreement, TooFewGiveANewcomerThatGetsNoStateNoMoreTime) {
  for (const bool gave_before : {false, true}) {
    Group group(3, 3);
    becomeTooFew(group);
    group.join(1);
    group.members[0].awaitStep(!gave_before);
    group.pass(5000);
    group.members[0].awaitStep(true);
    group.pass(4900);
    EXPECT_FALSE(group.raised[0] || group.raised[1]);
    group.pass(200);
    ASSERT_TRUE(group.raised[0] && group.raised[1]);
    EXPECT_EQ(group.raised[0]->error, Error::TooFew);
    EXPECT_EQ(group.raised[1]->error, Error::TooFew);
    EXPECT_EQ(group.raised[1]->view.members, ids({0, 1}));
  }
}

// Only rank 0 knows whether a state is on its way, or is about to begin with a newcomer that has one.
TEST(Agreement, NobodyButRankZeroRaisesWhileItMayStillLetANewcomerIn) {
  Group group(3, 3);
  becomeTooFew(group);
  group.pass(6000);
  group.join(1);
  group.pass(9000); // beyond quorum_wait and dead_after
  EXPECT_FALSE(group.raised[0] || group.raised[1]);
  Message join;
  join.kind = Message::Kind::Join;
  join.from = Group::idOf(3);
  join.step.finished = true;
  join.view = group.members[1].view().id();
  group.members[1].received(join, group.now);
  group.members[1].tick(group.now); // before rank 0's word arrives
  group.load(3, 0);
  group.pass(300);
  EXPECT_FALSE(group.raised[0] || group.raised[1]);
  ASSERT_EQ(group.installed[1].size(), 2U);
  EXPECT_EQ(group.installed[1][1].members, ids({0, 1, 3}));
}

TEST(Agreement, TooFewRaiseAlsoIfRankZeroSaysNothing) {
  Group group(3, 3);
  becomeTooFew(group);
  group.cut.insert({0, 1});
  group.pass(12'000);
  Message pong;
  pong.kind = Message::Kind::Pong;
  pong.from = Group::idOf(3); // a newcomer's
  group.members[1].received(pong, group.now);
  group.pass(1600); // quorum_wait, dead_after and what the detector has first
  EXPECT_TRUE(group.raised[0]);
  EXPECT_FALSE(group.raised[1]);
  group.pass(200);
  ASSERT_TRUE(group.raised[1]);
  EXPECT_EQ(group.raised[1]->error, Error::TooFew);
}

// While rank 0 gives a newcomer the state: the one that is left with it, or in its place, goes on with that.
TEST(Agreement, AFurtherDeathBehindTheTimeOfTooFewCostsNobodyItsPlace) {
  for (const size_t dies : {0U, 2U}) {
    Group group(4, 4);
    group.down[3] = true;
    for (const size_t i : {0U, 1U, 2U}) {
      group.members[i].certified(Group::idOf(3), group.records[3], group.now);
    }
    group.run();
    group.join(1);
    group.pass(12'000); // quorum_wait is over, join_pause not
    group.down[dies] = true;
    group.pass(dies == 0 ? 3100 : 0); // its detector speaks
    const std::vector<size_t> left = dies == 0 ? std::vector<size_t>{1, 2} : std::vector<size_t>{0, 1};
    for (const size_t i : left) {
      group.members[i].failed(
          dies == 0 ? ErrorCode::PeerUnresponsive : ErrorCode::ConnectionReset,
          Group::idOf(static_cast<int>(dies)),
          group.now);
    }
    group.run();
    group.pass(4000); // the members decide after 3750 if that may only have paused
    for (const size_t i : left) {
      EXPECT_FALSE(group.raised[i]) << dies << " " << i;
      EXPECT_EQ(group.installed[i].back().members.size(), 2U) << dies << " " << i;
    }
    group.pass(4500); // join_pause is over
    for (const size_t i : left) {
      ASSERT_TRUE(group.raised[i]) << dies << " " << i;
      EXPECT_EQ(group.raised[i]->error, Error::TooFew);
    }
  }
}

TEST(Agreement, AGoodbyeOfRankZeroThatIsLostIsSaidAgain) {
  Group group(3, 3);
  becomeTooFew(group);
  group.pass(9900);
  group.cut.insert({0, 1});
  group.pass(200);
  EXPECT_TRUE(group.raised[0]);
  EXPECT_FALSE(group.raised[1]);
  group.cut.clear();
  group.pass(300);
  ASSERT_TRUE(group.raised[1]);
  EXPECT_EQ(group.raised[1]->error, Error::TooFew);
}

// Of two newcomers that are needed, one still loads.
TEST(Agreement, TooFewLetInWhoHasLoadedWhenTheirTimeIsOut) {
  Group group(2, 3);
  group.down[1] = true;
  group.members[0].certified(Group::idOf(1), group.records[1], group.now);
  group.run();
  group.join(2);
  group.pass(2000);
  group.load(2, 0);
  group.pass(17'900); // quorum_wait and join_pause
  EXPECT_FALSE(group.raised[0]);
  ASSERT_EQ(group.installed[0].size(), 1U);
  group.pass(200);
  EXPECT_FALSE(group.raised[0]);
  ASSERT_EQ(group.installed[0].size(), 2U);
  EXPECT_EQ(group.installed[0][1].members, ids({0, 2}));
  group.pass(9000); // the time begins anew
  EXPECT_FALSE(group.raised[0]);
}

// ---- more newcomers than one stop lets in

constexpr int kAtOnce = static_cast<int>(kMaxNewcomers);

/// A word of a newcomer that holds nothing, if it comes to this member alone.
void ask(Group& group, size_t member, int newcomer) {
  Message join;
  join.kind = Message::Kind::Join;
  join.from = Group::idOf(newcomer);
  group.members[member].received(join, group.now);
  group.run();
}

std::vector<Incarnation> idsFrom(int first) {
  std::vector<Incarnation> found;
  for (int i = 0; i < kAtOnce; ++i) {
    found.push_back(Group::idOf(first + i));
  }
  return found;
}

TEST(Agreement, MembersThatKnowDifferentNewcomersComeToKnowTheSame) {
  Group group(2);
  for (int i = 0; i < 2 * kAtOnce; ++i) {
    group.cut.insert({i < kAtOnce ? 1U : 0U, static_cast<size_t>(2 + i)});
  }
  group.join(2 * kAtOnce);
  group.pass(50);
  group.cut.clear();
  group.pass(300);
  for (int64_t step = 1; step <= 2; ++step) {
    for (size_t i = 0; i < group.members.size(); ++i) {
      if (group.members[i].view().has(Group::idOf(static_cast<int>(i)))) {
        group.members[i].step({step, false, false});
        group.members[i].boundary(group.now);
      }
    }
    group.run();
    const std::vector<Incarnation> loading = group.members[0].loading();
    EXPECT_EQ(loading, idsFrom(step == 1 ? 2 : 2 + kAtOnce));
    for (const Incarnation& newcomer : loading) {
      group.load(newcomer.low - 1, step);
    }
    group.pass(500);
    ASSERT_EQ(group.members[0].view().members.size(), static_cast<size_t>(2 + step * kAtOnce));
    for (size_t i = group.members[0].view().members.size(); i < group.members.size(); ++i) {
      group.members[i].setContacts(group.members[0].view().members);
    }
    group.pass(300);
  }
}

TEST(Agreement, ALargerNewcomerTakesNobodysPlace) {
  Group group(1, 2);
  for (int i = 0; i < kAtOnce; ++i) {
    ask(group, 0, 2 + i);
  }
  ask(group, 0, 2 + kAtOnce);
  EXPECT_EQ(group.members[0].loading(), idsFrom(2));
  ask(group, 0, 1);
  EXPECT_EQ(group.members[0].loading(), idsFrom(1));
}

TEST(Agreement, ANewcomerForWhichMembersWaitKeepsItsPlace) {
  Group group(1);
  for (int i = 0; i < kAtOnce; ++i) {
    ask(group, 0, 2 + i);
  }
  group.stop(1);
  ask(group, 0, 1);
  EXPECT_EQ(group.members[0].loading(), idsFrom(2));
}

TEST(Agreement, ANewcomerThatHasLoadedKeepsItsPlace) {
  Group group(1, 3 + kMaxNewcomers);
  for (int i = 0; i < kAtOnce; ++i) {
    ask(group, 0, 2 + i);
  }
  Message join;
  join.kind = Message::Kind::Join;
  join.from = Group::idOf(1 + kAtOnce);
  join.step.finished = true;
  join.view = group.members[0].view().id();
  group.members[0].received(join, group.now);
  ask(group, 0, 1);
  EXPECT_EQ(group.members[0].holding(), std::vector<Incarnation>{join.from});
  EXPECT_EQ(group.members[0].loading().size(), kMaxNewcomers - 1);
  EXPECT_EQ(group.members[0].loading().front(), Group::idOf(1));
}

// The others know what a member has told all, and only the accused can do anything with it.
TEST(Agreement, ASilentMemberIsToldToTheOthersOnce) {
  Group group(4);
  group.down[3] = true;
  const auto told = [&](size_t i) {
    std::vector<Incarnation> to;
    for (const Action& action : group.members[i].takeActions()) {
      if (action.kind == Action::Kind::Send && action.message->kind == Message::Kind::Suspect) {
        to.insert(to.end(), action.to.begin(), action.to.end());
      }
    }
    return to;
  };
  group.members[0].failed(ErrorCode::ConnectionReset, Group::idOf(3), group.now);
  group.run();
  group.members[0].failed(ErrorCode::PeerUnresponsive, Group::idOf(3), group.now);
  group.members[1].failed(ErrorCode::PeerUnresponsive, Group::idOf(3), group.now); // nobody has said that yet
  EXPECT_EQ(told(1), ids({0, 2, 3}));
  group.run();
  group.members[2].failed(ErrorCode::PeerUnresponsive, Group::idOf(3), group.now);
  EXPECT_EQ(told(2), ids({3}));

  Group other(4);
  other.down[3] = true;
  std::swap(group.members, other.members);
  for (const size_t i : {0U, 1U}) { // the event of its own group comes behind the first one's word
    group.members[i].failed(ErrorCode::PeerUnresponsive, Group::idOf(3), group.now);
    (void)told(i);
    group.members[i].failed(ErrorCode::PeerUnresponsive, Group::idOf(3), group.now);
    EXPECT_EQ(told(i), ids({3}));
  }
}

// It would not know what those are called that have come since.
TEST(Agreement, TheStateOfOtherMembersAdmitsNobody) {
  Group group(2);
  group.join(1);
  group.pass(50);
  group.stop(1);
  group.members[2].loaded(1, group.members[0].view().id() + 1, group.now);
  group.pass(50);
  EXPECT_EQ(group.members[0].loading(), ids({2}));
  group.down[2] = true;
  group.pass(11'000);
  ASSERT_EQ(group.installed[0].size(), 1U);
  EXPECT_EQ(group.installed[0][0].members, ids({0, 1}));
}

// It votes from the moment on at which the others know that it is a member, which it may not live to learn.
TEST(Agreement, ANewcomerHasKeptARecordBeforeItSaysAnything) {
  Agreement::Config config;
  config.self = Group::idOf(2);
  Agreement newcomer(config, ids({0, 1}), TimePoint(std::chrono::hours(1)));
  const std::vector<Action> actions = newcomer.takeActions();
  ASSERT_EQ(actions.size(), 1U);
  EXPECT_EQ(actions[0].kind, Action::Kind::Keep);
}

TEST(Agreement, ANewcomerThatEndsWhileItIsAdmittedDoesNotCount) {
  for (const bool known_before : {false, true}) {
    Group group(2);
    group.join(1);
    group.pass(50);
    group.stop(1);
    group.load(2, 1);
    group.ends_at_accept = 2;
    group.certified_then = known_before;
    group.pass(50);
    ASSERT_EQ(group.installed[1].at(0).members, ids({0, 1, 2}));
    EXPECT_TRUE(group.installed[2].empty());
    if (!known_before) {
      group.members[1].certified(Group::idOf(2), group.records[2], group.now);
    }
    group.down[0] = true;
    group.members[1].certified(Group::idOf(0), group.records[0], group.now);
    group.run();
    group.pass(1000);
    EXPECT_FALSE(group.raised[1]);
    EXPECT_EQ(group.installed[1].back().members, ids({1}));
  }
}

// The decision that makes it a member may be overtaken by the first question of the next epoch.
// The kernel says so once only, and the newcomer is asked for no promise before it has loaded.
TEST(Agreement, ANewcomerThatKnowsOfTheEndOfAMemberBeginsWithThat) {
  Group group(2);
  group.join(1);
  group.pass(50);
  group.stop(1);
  group.members[2].certified(Group::idOf(1), group.records[1], group.now);
  group.load(2, 1);
  group.pass(50);
  ASSERT_EQ(group.installed[2].size(), 2U);
  EXPECT_EQ(group.installed[2][0].members, ids({0, 1, 2}));
  EXPECT_EQ(group.installed[2][1].members, ids({0, 2}));
}

TEST(Agreement, ANewcomerPromisesOnlyWhereItMayBeAdmitted) {
  Group group(1);
  Agreement::Config config;
  config.self = Group::idOf(2);
  Agreement newcomer(config, ids({0, 1}), group.now);
  newcomer.loaded(3, 77, group.now);
  (void)newcomer.takeActions();
  Message prepare;
  prepare.kind = Message::Kind::Prepare;
  prepare.from = Group::idOf(0);
  prepare.epoch = 1;
  prepare.view = 77;
  prepare.ballot = Ballot(0, 1, 0);
  newcomer.received(prepare, group.now);
  EXPECT_TRUE(newcomer.takeActions().empty());
  prepare.newcomers = ids({2});
  newcomer.received(prepare, group.now);
  const std::vector<Action> actions = newcomer.takeActions();
  ASSERT_EQ(actions.size(), 1U);
  EXPECT_EQ(actions[0].message->kind, Message::Kind::Promise);
}

// Members would wait for it, and it lives.
TEST(Agreement, ANewcomerThatIsAMemberWithTheStateOfAnotherStepOrOfOthersRaises) {
  for (const auto& [step, parent] : {std::pair(4, 77), std::pair(3, 78), std::pair(3, 77)}) {
    Group group(1);
    Agreement::Config config;
    config.self = Group::idOf(1);
    Agreement newcomer(config, ids({0}), group.now);
    newcomer.loaded(3, 77, group.now);
    Message decide;
    decide.kind = Message::Kind::Decide;
    decide.from = Group::idOf(0);
    decide.next.emplace();
    decide.next->epoch = 1;
    decide.next->parent = static_cast<uint64_t>(parent);
    decide.next->step = step;
    decide.next->members = ids({0, 1});
    newcomer.received(decide, group.now);
    const std::vector<Action> actions = newcomer.takeActions();
    ASSERT_FALSE(actions.empty());
    const bool fits = step == 3 && parent == 77;
    EXPECT_EQ(actions.back().kind, fits ? Action::Kind::Install : Action::Kind::Raise);
    EXPECT_TRUE(fits || actions.back().error == Error::NotAdmitted);
  }
}

// It has missed that it was a member, and the others have gone on without it.
TEST(Agreement, ANewcomerThatIsAMemberNoMoreEnds) {
  Group group(1);
  Agreement::Config config;
  config.self = Group::idOf(1);
  Agreement newcomer(config, ids({0}), group.now);
  newcomer.loaded(3, 77, group.now);
  (void)newcomer.takeActions();
  Message excluded;
  excluded.kind = Message::Kind::Excluded;
  excluded.from = Group::idOf(0);
  excluded.view = 77; // an answer to one of its words in a view that is over: it is asked again
  excluded.next.emplace();
  excluded.next->epoch = 2;
  excluded.next->members = ids({0});
  newcomer.received(excluded, group.now);
  EXPECT_TRUE(newcomer.takeActions().empty());
  excluded.view = 0;
  newcomer.received(excluded, group.now);
  const std::vector<Action> actions = newcomer.takeActions();
  ASSERT_EQ(actions.size(), 1U);
  EXPECT_EQ(actions[0].kind, Action::Kind::Raise);
  EXPECT_EQ(actions[0].error, Error::LeftBehind);
  EXPECT_EQ(newcomer.nextTick(), TimePoint::max());
}

TEST(Agreement, MembersStopForANewcomerThatDoesNotLoadEverMoreRarely) {
  Group group(2);
  Message join;
  join.kind = Message::Kind::Join;
  join.from = Group::idOf(7);
  std::vector<TimePoint::duration> pauses;
  TimePoint last = group.now;
  for (int64_t step = 1; pauses.size() < 4; ++step) {
    ASSERT_LT(step, 10'000);
    for (Agreement& member : group.members) {
      member.received(join, group.now); // it asks again and again
    }
    group.run();
    const bool stops = group.members[0].admits() && group.members[1].admits();
    for (Agreement& member : group.members) {
      member.step({step, false, false});
      if (stops) {
        member.boundary(group.now);
      }
    }
    if (stops) {
      pauses.push_back(group.now - last);
      for (int ms = 0; ms < 12'000 && group.installed[0].size() < pauses.size(); ms += 10) { // join_pause
        group.pass(10);
      }
      ASSERT_EQ(group.installed[0].size(), pauses.size());
      EXPECT_EQ(group.installed[0].back().members, ids({0, 1}));
      last = group.now;
    }
    group.pass(50);
  }
  EXPECT_GT(pauses[2], pauses[1]);
  EXPECT_GT(pauses[3], pauses[2]);
}

TEST(Agreement, ANewcomerDoesNotVote) {
  Group group(2);
  group.join(1);
  group.pass(50);
  group.load(2, 0);
  group.pass(50);
  group.down[0] = true;
  group.members[1].failed(ErrorCode::PeerDead, Group::idOf(0), group.now);
  group.run();
  group.pass(10'100);
  EXPECT_TRUE(group.installed[1].empty());
  EXPECT_TRUE(group.installed[2].empty());
  ASSERT_TRUE(group.raised[1]);
  EXPECT_EQ(group.raised[1]->error, Error::QuorumLost);
}

TEST(Agreement, ANewcomerThatNobodyAnswersFoundsNoGroup) {
  Group group(1);
  group.down[0] = true;
  Agreement::Config config;
  config.self = Group::idOf(1);
  Agreement newcomer(config, ids({0}), group.now);
  for (int ms = 0; ms < 60500; ms += 100) {
    newcomer.tick(group.now + milliseconds(ms));
  }
  const std::vector<Action> actions = newcomer.takeActions();
  ASSERT_FALSE(actions.empty());
  EXPECT_EQ(actions.back().kind, Action::Kind::Raise);
  EXPECT_EQ(actions.back().error, Error::NotAdmitted);
}

TEST(Agreement, AProposerThatDoesNotCountTheLivingIsIgnored) {
  Group group(3);
  Message prepare;
  prepare.kind = Message::Kind::Prepare;
  prepare.from = Group::idOf(1);
  prepare.view = group.members[0].view().id();
  prepare.cause = ErrorCode::PeerDead;
  prepare.ballot = Ballot(400, 1, 1); // without testaments
  group.members[0].received(prepare, group.now);
  EXPECT_TRUE(group.members[0].takeActions().empty());
  prepare.ballot = Ballot(0, 1, 2); // another's
  group.members[0].received(prepare, group.now);
  EXPECT_TRUE(group.members[0].takeActions().empty());
}

TEST(Agreement, SideThatAcceptsSplitBrainGoesOn) {
  Group group(1);
  View first;
  first.members = ids({0, 1});
  Agreement::Config config;
  config.self = Group::idOf(1);
  config.accept_split_brain = true;
  Agreement alone(config, first, group.now);
  alone.failed(ErrorCode::PeerUnresponsive, Group::idOf(0), group.now);
  alone.sealed(group.now);
  bool installed = false;
  for (int ms = 0; ms < 3000; ms += 10) {
    alone.tick(group.now + milliseconds(ms));
    for (const Action& action : alone.takeActions()) {
      installed = installed || (action.kind == Action::Kind::Install && action.view.members == ids({1}));
    }
  }
  EXPECT_TRUE(installed);
}

} // namespace
} // namespace pycomm::elastic
