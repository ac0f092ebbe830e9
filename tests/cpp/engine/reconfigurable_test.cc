#include "engine/reconfigurable.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "allocations.h"
#include "engine/meeting/endpoint_words.h"
#include "engine/meeting/meeting_store.h"
#include "ranks.h"
#include "transport/net/hello.h"
#include "transport/net/socket_link.h"
#include "transport/secure/secret.h"
#include "within.h"

namespace pycomm {
namespace {

using testing::groupConfig;

/// A process of a test: its own engine, endpoint and incarnation.
struct Process {
  explicit Process(const std::function<void(Group::Config&)>& adjust = {}) {
    Group::Config config = groupConfig(0, 1);
    config.dead_after_ms = 60000; // however busy the machine is
    if (adjust) {
      adjust(config);
    }
    members = std::make_unique<Reconfigurable>(engine, config);
  }
  ~Process() {
    leave();
  }
  void leave() {
    if (group != nullptr) {
      group->close();
      group.reset();
    }
  }
  /// Leaves its group and meets the list; the error if that fails.
  std::optional<ErrorRecord> meet(int64_t uuid, const std::vector<std::string>& handles, int64_t timeout_ms = 60000) {
    JoinAbort nobody;
    return meet(uuid, handles, timeout_ms, nobody);
  }
  std::optional<ErrorRecord> meet(
      int64_t uuid,
      const std::vector<std::string>& handles,
      int64_t timeout_ms,
      JoinAbort& abort) {
    const Deadline deadline = Deadline::after(timeout_ms);
    try {
      const Reconfigurable::Plan plan = members->plan(uuid, handles);
      leave();
      Reconfigurable::Met met = members->meet(plan, deadline, abort);
      store = met.store;
      group = met.group;
      return std::nullopt;
    } catch (const Error& error) {
      return error.record();
    }
  }

  Engine engine;
  std::shared_ptr<Store> store;
  std::shared_ptr<Group> group;
  std::unique_ptr<Reconfigurable> members;
};

std::vector<std::unique_ptr<Process>> processes(int count, const std::function<void(Group::Config&)>& adjust = {}) {
  std::vector<std::unique_ptr<Process>> made;
  for (int i = 0; i < count; ++i) {
    made.push_back(std::make_unique<Process>(adjust));
  }
  return made;
}

std::vector<std::string> handlesOf(const std::vector<Process*>& members) {
  std::vector<std::string> handles;
  for (const Process* member : members) {
    handles.push_back(member->members->handle());
  }
  return handles;
}

struct Outcome {
  std::optional<ErrorRecord> error;
  int64_t took_ms = 0;
};

/// Those who call, at the same time, with one list.
std::vector<Outcome> meetAll(
    const std::vector<Process*>& callers,
    int64_t uuid,
    const std::vector<std::string>& handles,
    int64_t timeout_ms = 60000) {
  std::vector<Outcome> outcomes(callers.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < callers.size(); ++i) {
    threads.emplace_back([&, i] {
      const TimePoint began = Clock::now();
      outcomes[i].error = callers[i]->meet(uuid, handles, timeout_ms);
      outcomes[i].took_ms = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - began).count();
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return outcomes;
}

/// Ranks of a job, and the numbers that they have in it.
std::vector<std::unique_ptr<Process>> processesOfJob(const std::vector<int>& numbers) {
  std::vector<std::unique_ptr<Process>> made;
  for (size_t i = 0; i < numbers.size(); ++i) {
    made.push_back(std::make_unique<Process>([&](Group::Config& config) {
      config.rendezvous.rank = static_cast<int>(i);
      config.rendezvous.size = static_cast<int>(numbers.size());
      config.rendezvous.job = JobRanks(numbers);
    }));
  }
  return made;
}

void expectSums(const std::vector<Process*>& members) {
  std::vector<std::thread> threads;
  for (size_t i = 0; i < members.size(); ++i) {
    threads.emplace_back([&, i] {
      Group& group = *members[i]->group;
      ASSERT_EQ(group.identity().rank, static_cast<int>(i));
      ASSERT_EQ(group.identity().size, static_cast<int>(members.size()));
      std::vector<float> values(1000, 1.0F + static_cast<float>(i));
      Group::Call call;
      call.schedule.kind = Collective::AllReduce;
      call.schedule.dtype = DType::Float32;
      call.schedule.reduce_op = ReduceOp::Sum;
      call.schedule.numel = static_cast<int64_t>(values.size());
      call.schedule.rank = group.identity().rank;
      call.schedule.size = group.identity().size;
      call.input = call.output = {reinterpret_cast<std::byte*>(values.data()), values.size() * sizeof(float)};
      call.deadline = Deadline::after(60000);
      call.waits = true;
      const auto operation = group.start(call);
      ASSERT_TRUE(group.wait(*operation, Deadline::after(60000)));
      ASSERT_FALSE(operation->error()) << operation->error()->text();
      const auto n = static_cast<float>(members.size());
      EXPECT_EQ(values.back(), n * (n + 1) / 2);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

void expectMet(const std::vector<Outcome>& outcomes) {
  for (const Outcome& outcome : outcomes) {
    EXPECT_FALSE(outcome.error) << outcome.error->text();
  }
}

TEST(Instance, FailsIfAMemberLeavesBeforeAllAreReadyAndNotAfter) {
  std::vector<MemberHandle> members(3);
  for (MemberHandle& member : members) {
    member.incarnation = newProcessId();
  }
  for (const bool all_ready : {false, true}) {
    Instance instance(1, members);
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_TRUE(instance.enter(rank));
      EXPECT_FALSE(instance.enter(rank));
    }
    instance.set("key", "value");
    for (int rank = 0; rank < (all_ready ? 3 : 2); ++rank) {
      const Instance::Ready ready = instance.ready(rank);
      EXPECT_EQ(ready.count, rank + 1);
      EXPECT_EQ(ready.first_missing, rank == 2 ? -1 : rank + 1);
    }
    EXPECT_EQ(instance.ready(0).count, all_ready ? 3 : 2); // each counts once
    instance.left(1, true);
    ASSERT_EQ(instance.failure().has_value(), !all_ready);
    if (!all_ready) {
      EXPECT_EQ(instance.failure()->peer, 1);
      EXPECT_THROW((void)instance.find("key"), Error);
      EXPECT_THROW((void)instance.ready(2), Error);
      EXPECT_FALSE(instance.allTold());
      instance.told(2);
      EXPECT_TRUE(instance.allTold());
    }
  }
}

TEST(Instance, CannotFailOnceAllAreReady) {
  Instance instance(1, std::vector<MemberHandle>(2));
  ErrorRecord first;
  first.summary = "the first cause";
  (void)instance.ready(0);
  (void)instance.ready(1);
  EXPECT_FALSE(instance.fail(first));
  EXPECT_FALSE(instance.failure());
  Instance fails(2, std::vector<MemberHandle>(2));
  (void)fails.ready(0);
  EXPECT_TRUE(fails.fail(first));
  EXPECT_TRUE(fails.fail(ErrorRecord()));
  EXPECT_EQ(fails.failure()->summary, first.summary);
}

TEST(Instance, CountersHaveTheLimitsOfTheRest) {
  Instance instance(1, std::vector<MemberHandle>(2));
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(instance.add("a", kMost), kMost);
  EXPECT_THROW((void)instance.add("a", 1), Error);
  EXPECT_EQ(instance.add("a", -1), kMost - 1);
  const std::string key(1 << 20, 'k');
  for (int i = 0; i < 63; ++i) {
    EXPECT_EQ(instance.add(key + std::to_string(i), 1), 1);
  }
  EXPECT_THROW((void)instance.add(key + "last", 1), Error);
  EXPECT_THROW(instance.set("value", key), Error);
  EXPECT_EQ(instance.add(key + "0", 1), 2); // it is there already
}

TEST(Reconfigurable, MembersMeetShrinkAndMeetAgain) {
  const auto made = processes(3);
  Process* const a = made[0].get();
  Process* const b = made[1].get();
  Process* const c = made[2].get();
  int64_t uuid = 0;
  for (const std::vector<Process*>& members :
       std::vector<std::vector<Process*>>{{a, b, c}, {a, b}, {b, c}, {c, b, a}, {c}, {a}, {b, a, c}, {a, c}}) {
    expectMet(meetAll(members, ++uuid, handlesOf(members)));
    expectSums(members);
    EXPECT_EQ(members.front()->group->identity().epoch, uuid);
  }
}

TEST(Reconfigurable, MembersMeetOverEachTransportWithAndWithoutASecret) {
  for (const bool closed : {false, true}) {
    const auto secret = closed ? std::make_shared<const Secret>(Secret::generate()) : nullptr;
    for (const Transport transport : {Transport::Auto, Transport::Tcp}) {
      const auto made = processes(3, [&](Group::Config& config) {
        config.transport = transport;
        config.security.secret = secret;
      });
      const std::vector<Process*> members = {made[0].get(), made[1].get(), made[2].get()};
      expectMet(meetAll(members, 1, handlesOf(members)));
      expectSums(members);
      EXPECT_EQ(members[0]->group->identity().tls != nullptr, closed);
      expectMet(meetAll({members[2], members[1]}, 2, handlesOf({members[2], members[1]})));
      expectSums({members[2], members[1]});
    }
  }
}

TEST(Reconfigurable, WithoutASecretThereIsNoPortUnderRequire) {
  const auto made = processes(2, [](Group::Config& config) { config.security.policy = SecurityPolicy::Require; });
  const std::vector<Process*> members = {made[0].get(), made[1].get()};
  EXPECT_TRUE(MemberHandle::parse(members[0]->members->handle()).addresses.empty());
  expectMet(meetAll(members, 1, handlesOf(members)));
  expectSums(members);
}

TEST(Reconfigurable, WrongArgumentsTouchNothing) {
  const auto made = processes(2);
  const std::vector<Process*> members = {made[0].get(), made[1].get()};
  const std::vector<std::string> handles = handlesOf(members);
  expectMet(meetAll(members, 1, handles));
  const auto codeOf = [&](int64_t uuid, const std::vector<std::string>& list) {
    try {
      (void)members[0]->members->plan(uuid, list);
    } catch (const Error& error) {
      return error.record().code;
    }
    return ErrorCode::Ok;
  };
  EXPECT_EQ(codeOf(1, handles), ErrorCode::InvalidArgument); // already used
  EXPECT_EQ(codeOf(2, {}), ErrorCode::InvalidArgument);
  EXPECT_EQ(codeOf(2, {handles[1]}), ErrorCode::InvalidArgument);
  EXPECT_EQ(codeOf(2, {handles[0], handles[1], handles[0]}), ErrorCode::InvalidArgument);
  EXPECT_EQ(codeOf(2, {handles[0], "no handle"}), ErrorCode::InvalidArgument);
  MemberHandle other = MemberHandle::parse(handles[1]);
  other.key_id = "01234567";
  EXPECT_EQ(codeOf(2, {handles[0], other.text()}), ErrorCode::ConfigMismatch);
  expectSums(members);
  EXPECT_EQ(codeOf(2, handles), ErrorCode::Ok); // none of them has used it up
}

class Absent : public ::testing::TestWithParam<int> {};

TEST_P(Absent, IsNamedByAllWhoCalledInTime) {
  constexpr int64_t kTimeoutMs = 3000; // in which both call
  const int absent = GetParam();
  const auto made = processes(3);
  std::vector<Process*> all;
  std::vector<Process*> callers;
  for (int i = 0; i < 3; ++i) {
    all.push_back(made[static_cast<size_t>(i)].get());
    if (i != absent) {
      callers.push_back(all.back());
    }
  }
  for (const Outcome& outcome : meetAll(callers, 1, handlesOf(all), kTimeoutMs)) {
    ASSERT_TRUE(outcome.error);
    EXPECT_EQ(outcome.error->code, ErrorCode::RendezvousTimeout) << outcome.error->text();
    EXPECT_EQ(outcome.error->peer, absent) << outcome.error->text();
    EXPECT_NE(outcome.error->summary.find("rank " + std::to_string(absent) + " of the new group"), std::string::npos)
        << outcome.error->text();
    EXPECT_WITHIN_MS(outcome.took_ms, kTimeoutMs + 1000);
  }
  expectMet(meetAll(callers, 2, handlesOf(callers)));
  expectSums(callers);
}

TEST_P(Absent, IsNamedSoonIfItsProcessHasEnded) {
  const auto ended = static_cast<size_t>(GetParam());
  auto made = processes(3);
  std::vector<Process*> all = {made[0].get(), made[1].get(), made[2].get()};
  const std::vector<std::string> handles = handlesOf(all);
  expectMet(meetAll(all, 1, handles));
  made[ended].reset();
  all.erase(all.begin() + static_cast<std::ptrdiff_t>(ended));
  for (const Outcome& outcome : meetAll(all, 2, handles)) {
    ASSERT_TRUE(outcome.error);
    EXPECT_EQ(outcome.error->code, ErrorCode::PeerDead) << outcome.error->text();
    EXPECT_EQ(outcome.error->peer, static_cast<int>(ended)) << outcome.error->text();
    EXPECT_WITHIN_MS(outcome.took_ms, 4000);
  }
}

INSTANTIATE_TEST_SUITE_P(Reconfigurable, Absent, ::testing::Values(0, 1, 2));

TEST(Reconfigurable, AMemberThatGivesUpEndsItForAll) {
  const auto made = processes(3);
  const std::vector<Process*> all = {made[0].get(), made[1].get(), made[2].get()};
  const std::vector<std::string> handles = handlesOf(all);
  std::vector<Outcome> outcomes(2);
  const TimePoint began = Clock::now();
  std::thread patient([&] { outcomes[0].error = all[0]->meet(1, handles, 60000); });
  std::thread hasty([&] { outcomes[1].error = all[1]->meet(1, handles, 3000); });
  patient.join();
  hasty.join();
  EXPECT_WITHIN_MS(testing::elapsedMs(began), 6000); // the first deadline ends it
  for (const Outcome& outcome : outcomes) {
    ASSERT_TRUE(outcome.error);
    EXPECT_EQ(outcome.error->peer, 2) << outcome.error->text();
    EXPECT_EQ(outcome.error->epoch, 1) << outcome.error->text();
  }
}

TEST(Reconfigurable, AnotherListForTheUuidIsNamedOnBothSides) {
  const auto made = processes(2);
  const std::vector<std::string> handles = handlesOf({made[0].get(), made[1].get()});
  std::vector<std::optional<ErrorRecord>> errors(2);
  std::thread first([&] { errors[0] = made[0]->meet(1, {handles[0], handles[1]}); });
  std::thread second([&] { errors[1] = made[1]->meet(1, {handles[1], handles[0]}); });
  first.join();
  second.join();
  for (const auto& error : errors) {
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code, ErrorCode::ConfigMismatch) << error->text();
    EXPECT_NE(error->summary.find("another list"), std::string::npos) << error->text();
  }
}

/// What a connection gets that asks at a member's endpoint.
std::string answerAt(
    Process& process,
    const std::string& to,
    const std::string& from,
    const std::string& instance,
    int64_t uuid,
    int rank,
    const ProcessId& visiting = newProcessId()) {
  const MemberHandle handle = MemberHandle::parse(process.members->handle());
  Process visitor;
  const auto endpoint = Endpoint::open(visitor.engine.control(), {{}, "", nullptr, visiting, 1});
  const AbortToken none;
  Dialed dialed = dial(handle, {*endpoint, handle, true}, Deadline::after(20000), none);
  if (dialed.link == nullptr) {
    return dialed.why;
  }
  const std::string uuid_text = std::to_string(uuid);
  const std::string rank_text = std::to_string(rank);
  return askEndpoint(
             *dialed.link,
             {endpoint_request::kEnter, to, from, instance, uuid_text, rank_text},
             Deadline::after(20000),
             none)
      .front();
}

TEST(Endpoint, LetsInNobodyWhoNamesAnotherIncarnationUuidOrList) {
  auto made = processes(2);
  const std::vector<std::string> handles = handlesOf({made[0].get(), made[1].get()});
  const MemberHandle first = MemberHandle::parse(handles[0]);
  const MemberHandle second = MemberHandle::parse(handles[1]);
  const std::string name = instanceOf(7, {first, second});
  JoinAbort abort;
  std::thread waits([&] { (void)made[0]->meet(7, handles, 120000, abort); });
  for (const Deadline end = Deadline::after(60000);
       answerAt(*made[0], first.incarnation, second.incarnation, name, 7, 5) == endpoint_answer::kNotYet &&
       !end.expired();) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  const std::string stranger = newProcessId();
  const std::string other_list = instanceOf(7, {second, first});
  EXPECT_EQ(answerAt(*made[0], stranger, second.incarnation, name, 7, 1), endpoint_answer::kGone);
  EXPECT_EQ(answerAt(*made[0], first.incarnation, stranger, name, 7, 1), endpoint_answer::kGone);
  EXPECT_EQ(answerAt(*made[0], first.incarnation, second.incarnation, name, 7, 0), endpoint_answer::kGone);
  EXPECT_EQ(answerAt(*made[0], first.incarnation, second.incarnation, other_list, 7, 1), endpoint_answer::kOther);
  EXPECT_EQ(
      answerAt(*made[0], first.incarnation, second.incarnation, instanceOf(8, {first, second}), 8, 1),
      endpoint_answer::kNotYet);
  ErrorRecord reason;
  reason.code = ErrorCode::Aborted;
  abort.abort(reason);
  waits.join();
  EXPECT_EQ(answerAt(*made[0], first.incarnation, second.incarnation, name, 7, 1), endpoint_answer::kFailed);
}

TEST(Endpoint, AnswersNobodyWhoHasAnEarlierHandleOfItsPort) {
  Process process;
  MemberHandle handle = MemberHandle::parse(process.members->handle());
  handle.nonce ^= 1;
  handle.unix_socket.clear();
  Process visitor;
  const auto endpoint = Endpoint::open(visitor.engine.control(), {{}, "", nullptr, newProcessId(), 1});
  const AbortToken none;
  const Dialed dialed = dial(handle, {*endpoint, handle, true}, Deadline::after(20000), none);
  EXPECT_EQ(dialed.link, nullptr);
  EXPECT_TRUE(dialed.another_listens) << dialed.why;
}

/// An endpoint with one incarnation, and a visitor of the same process.
struct Visited {
  Visited() {
    Endpoint::Config config;
    config.id = newProcessId();
    config.nonce = 7;
    config.listeners.push_back(Listener::bind(SocketAddress::loopback(AddressFamily::IPv4), {}));
    endpoint = Endpoint::open(engine.control(), std::move(config));
    MemberHandle first;
    first.incarnation = newProcessId();
    MemberHandle second;
    second.incarnation = newProcessId();
    instance = std::make_shared<Instance>(1, std::vector<MemberHandle>{endpoint->addressed(first), second});
    endpoint->add(first.incarnation);
    visitor = Endpoint::open(engine.control(), {{}, "", nullptr, newProcessId(), 1});
  }
  [[nodiscard]] std::unique_ptr<Link> dial() const {
    const AbortToken none;
    const MemberHandle& first = instance->member(0);
    return pycomm::dial(first, {*visitor, first, false}, Deadline::after(20000), none).link;
  }
  /// A connection that has entered as rank 1; null if it may not.
  [[nodiscard]] std::unique_ptr<Link> entered() const {
    endpoint->call(instance->member(0).incarnation, instance);
    auto link = dial();
    const std::vector<std::string> words = requestFor(endpoint_request::kEnter, *instance, 0, 1);
    return link != nullptr && ask(*link, {words.begin(), words.end()}) == endpoint_answer::kHere ? std::move(link)
                                                                                                 : nullptr;
  }
  [[nodiscard]] static std::string ask(Link& link, const std::vector<std::string_view>& request) {
    const AbortToken none;
    return askEndpoint(link, request, Deadline::after(20000), none).front();
  }

  Engine engine;
  std::shared_ptr<Endpoint> endpoint;
  std::shared_ptr<Endpoint> visitor;
  std::shared_ptr<Instance> instance;
};

// The next one gets the descriptors of one that could not open: the loop must have forgotten those.
TEST(Endpoint, OneThatCannotOpenForWantOfMemoryLeavesNothing) {
  bool struck = true;
  int refused = 0;
  for (int64_t nth = 1; struck; ++nth) {
    ASSERT_LT(nth, 1000);
    Engine engine;
    for (const bool again : {false, true}) {
      Endpoint::Config config;
      config.id = newProcessId();
      config.nonce = 7;
      for (int i = 0; i < 2; ++i) {
        config.listeners.push_back(Listener::bind(SocketAddress::loopback(AddressFamily::IPv4), {}));
      }
      engine.control().run([&] { testing::failAllocation(again ? 0 : nth); });
      try {
        (void)Endpoint::open(engine.control(), std::move(config));
      } catch (const std::bad_alloc&) {
        refused += 1;
        EXPECT_FALSE(again);
      } catch (const Error& error) {
        ADD_FAILURE() << error.record().text() << ", allocation " << nth;
      }
      engine.control().run([&] {
        struck = again ? struck : testing::allocationFailed();
        testing::failAllocation(0);
      });
    }
  }
  EXPECT_GE(refused, 4);
}

// It dials again, as one does that has waited in vain for the answer.
TEST(Endpoint, OneThatHangsUpBeforeItKnowsThatItHasEnteredMayEnterAgain) {
  const Visited visited;
  ASSERT_NE(visited.entered(), nullptr);
  std::unique_ptr<Link> again;
  for (const Deadline most = Deadline::after(5000); again == nullptr && !most.expired(); again = visited.entered()) {
  }
  EXPECT_FALSE(visited.instance->failure());
  ASSERT_NE(again, nullptr);
  EXPECT_EQ(Visited::ask(*again, {endpoint_request::kHas, "a"}), endpoint_answer::kNone);
}

/// What the control loop does without memory for its `nth` allocation. Whether it made so many.
bool strikes(Engine& engine, int64_t nth, const std::function<void()>& body) {
  engine.control().run([&] { testing::failAllocation(nth); });
  body();
  bool struck = false;
  engine.control().run([&] {
    struck = testing::allocationFailed();
    testing::failAllocation(0);
  });
  return struck;
}

// Else nobody learns that the member has ended.
TEST(Endpoint, OneWhoseMemberHangsUpWithoutMemoryEndsItNevertheless) {
  bool struck = true;
  for (int64_t nth = 1; struck; ++nth) {
    ASSERT_LT(nth, 100);
    Visited visited;
    auto link = visited.entered();
    EXPECT_EQ(Visited::ask(*link, {endpoint_request::kHas, "a"}), endpoint_answer::kNone);
    struck = strikes(visited.engine, nth, [&] {
      link.reset();
      for (const Deadline most = Deadline::after(5000); !visited.instance->failure() && !most.expired();) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
    ASSERT_TRUE(visited.instance->failure()) << "allocation " << nth;
    EXPECT_EQ(visited.instance->failure()->peer, 1);
  }
}

TEST(Endpoint, OneThatAsksWithItsHelloIsAnsweredOrSentAwayAlsoWithoutMemory) {
  bool struck = true;
  for (int64_t nth = 1; struck; ++nth) {
    ASSERT_LT(nth, 100);
    Visited visited;
    const AbortToken none;
    const std::vector<std::string> words = requestFor(endpoint_request::kEnter, *visited.instance, 0, 1);
    const std::string bytes = encodeHello(Endpoint::hello(7)) + packWords({words.begin(), words.end()});
    const Deadline deadline = Deadline::after(5000);
    struck = strikes(visited.engine, nth, [&] {
      const auto link = connectSocket({}, visited.instance->member(0).addresses.front(), deadline, none);
      writeAll(*link, {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()}, deadline, none);
      std::array<std::byte, sizeof(FrameHeader) + 1> answer{}; // the Hello's, and more
      try {
        readAll(*link, {answer.data(), answer.size()}, deadline, none);
      } catch (const Error& error) {
        EXPECT_EQ(error.record().code, ErrorCode::ConnectionReset) << error.record().text() << ", allocation " << nth;
      }
    });
  }
}

TEST(Endpoint, AnswersCompleteToAMemberThatGivesUpWhenAllAreReady) {
  const Visited visited;
  visited.endpoint->call(visited.instance->member(0).incarnation, visited.instance);
  const auto link = visited.dial();
  ASSERT_NE(link, nullptr);
  const std::vector<std::string> words = requestFor(endpoint_request::kEnter, *visited.instance, 0, 1);
  ASSERT_EQ(Visited::ask(*link, {words.begin(), words.end()}), endpoint_answer::kHere);
  EXPECT_EQ(Visited::ask(*link, {endpoint_request::kReady}), endpoint_answer::kHere);
  (void)visited.instance->ready(0);
  ErrorRecord late;
  late.code = ErrorCode::RendezvousTimeout;
  late.rank = 1;
  const std::string record = late.serialize();
  EXPECT_EQ(Visited::ask(*link, {endpoint_request::kFail, record}), endpoint_answer::kComplete);
  EXPECT_FALSE(visited.instance->failure());
}

// The search for members ends in a destructor.
TEST(AbortToken, AReasonThatIsGivenAwayNeedsNoMemory) {
  AbortToken token;
  ErrorRecord reason;
  reason.code = ErrorCode::ShutDown;
  reason.summary = "a reason that is longer than a string can be without memory of its own";
  EXPECT_FALSE(testing::throwsWithoutMemory(1, [&] { EXPECT_TRUE(token.abort(std::move(reason))); }));
  EXPECT_EQ(token.reason().code, ErrorCode::ShutDown);
}

// A session ends in a destructor.
TEST(Instance, AMemberThatHangsUpFailsItAlsoWithoutMemory) {
  bool failed = true;
  for (int64_t nth = 1; failed; ++nth) {
    ASSERT_LT(nth, 100);
    MemberHandle first;
    first.incarnation = newProcessId();
    MemberHandle second;
    second.incarnation = newProcessId();
    Instance instance(1, {first, second});
    ASSERT_TRUE(instance.enter(1));
    EXPECT_FALSE(testing::throwsWithoutMemory(nth, [&] { instance.left(1, true); })) << nth;
    failed = instance.failure() && instance.failure()->code == ErrorCode::OutOfMemory;
    ASSERT_TRUE(instance.failure());
    EXPECT_EQ(instance.failure()->peer, 1);
    EXPECT_TRUE(failed || instance.failure()->code == ErrorCode::PeerDead);
    EXPECT_TRUE(failed || nth > 1) << "nothing failed";
  }
}

TEST(Endpoint, HangsUpOnALargeRequestBeforeEntryAndOnTwoAtOnce) {
  const Visited visited;
  const auto link = visited.dial();
  ASSERT_NE(link, nullptr);
  const std::string large(kMaxFirstEndpointFrame, 'x');
  EXPECT_THROW((void)Visited::ask(*link, {endpoint_request::kLook, large}), Error);
  const auto other = visited.dial();
  ASSERT_NE(other, nullptr);
  const std::string twice = packWords({endpoint_request::kHas, "a"}) + packWords({endpoint_request::kHas, "a"});
  const AbortToken none;
  const Deadline deadline = Deadline::after(20000);
  writeAll(*other, {reinterpret_cast<const std::byte*>(twice.data()), twice.size()}, deadline, none);
  std::byte answer{};
  EXPECT_THROW(readAll(*other, {&answer, 1}, deadline, none), Error);
}

TEST(Endpoint, KnowsNobodyWhoWasRemoved) {
  const Visited visited;
  const ProcessId self = visited.instance->member(0).incarnation;
  visited.endpoint->remove(self);
  EXPECT_THROW(visited.endpoint->call(self, visited.instance), Error);
  const auto link = visited.dial();
  ASSERT_NE(link, nullptr);
  const std::vector<std::string> words = requestFor(endpoint_request::kEnter, *visited.instance, 0, 1);
  EXPECT_EQ(Visited::ask(*link, {words.begin(), words.end()}), endpoint_answer::kGone);
}

TEST(Reconfigurable, AMemberWithoutAWayToAnotherFailsAtOnceAndNamesIt) {
  Process process;
  MemberHandle elsewhere = MemberHandle::parse(process.members->handle());
  elsewhere.incarnation = newProcessId();
  elsewhere.host.hostname = "elsewhere";
  elsewhere.addresses = {SocketAddress::loopback(AddressFamily::IPv4).withPort(4711)};
  const TimePoint began = Clock::now();
  const auto error = process.meet(1, {process.members->handle(), elsewhere.text()}, 20000);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code, ErrorCode::ConnectFailed) << error->text();
  EXPECT_EQ(error->peer, 1) << error->text();
  EXPECT_WITHIN_MS(testing::elapsedMs(began), 5000);
}

/// While a process is stopped, its loops do nothing.
void stop(Process& process, int ms) {
  const auto stands = std::make_shared<std::promise<void>>();
  process.engine.control().post([stands, ms] {
    stands->set_value();
    std::this_thread::sleep_for(std::chrono::milliseconds(ms));
  });
  stands->get_future().wait();
}

TEST(Reconfigurable, AFirstMemberThatIsStoppedWhileOthersEnterIsMetAfterwards) {
  const auto made = processes(2, [](Group::Config& config) { config.dead_after_ms = 1000; });
  const std::vector<Process*> all = {made[0].get(), made[1].get()};
  const std::vector<std::string> handles = handlesOf(all);
  std::optional<ErrorRecord> error;
  std::thread enters([&] { error = all[1]->meet(1, handles); });
  std::this_thread::sleep_for(std::chrono::milliseconds(500)); // it asks whether it may enter
  stop(*all[0], 2500);
  const auto error_of_first = all[0]->meet(1, handles);
  enters.join();
  EXPECT_FALSE(error_of_first) << error_of_first->text();
  EXPECT_FALSE(error) << error->text();
}

TEST(Reconfigurable, AFirstMemberThatIsStoppedWhileOthersWaitInItIsNamedByAll) {
  const auto made = processes(3, [](Group::Config& config) { config.dead_after_ms = 1000; });
  const std::vector<Process*> all = {made[0].get(), made[1].get(), made[2].get()};
  const std::vector<std::string> handles = handlesOf(all);
  std::vector<Outcome> outcomes;
  std::thread meets([&] { outcomes = meetAll({all[0], all[1]}, 1, handles); });
  std::this_thread::sleep_for(std::chrono::milliseconds(2000)); // they wait for the third
  stop(*all[0], 3000);
  meets.join();
  for (const Outcome& outcome : outcomes) {
    ASSERT_TRUE(outcome.error);
    EXPECT_EQ(outcome.error->code, ErrorCode::PeerUnresponsive) << outcome.error->text();
    EXPECT_EQ(outcome.error->peer, 0) << outcome.error->text();
  }
}

// The answer may be lost with the connection.
TEST(Reconfigurable, AMemberThatEntersAndHangsUpEntersAgain) {
  auto made = processes(2);
  const std::vector<Process*> members = {made[0].get(), made[1].get()};
  const std::vector<std::string> handles = handlesOf(members);
  const MemberHandle first = MemberHandle::parse(handles[0]);
  const MemberHandle second = MemberHandle::parse(handles[1]);
  const std::string name = instanceOf(1, {first, second});
  std::optional<ErrorRecord> error;
  std::thread waits([&] { error = made[0]->meet(1, handles); });
  int entered = 0;
  for (const Deadline end = Deadline::after(60000); entered < 20 && !end.expired();) {
    const std::string answer = answerAt(*made[0], first.incarnation, second.incarnation, name, 1, 1, second.endpoint);
    entered += answer == endpoint_answer::kHere ? 1 : 0;
  }
  EXPECT_EQ(entered, 20);
  const auto error_of_second = made[1]->meet(1, handles);
  EXPECT_FALSE(error_of_second) << error_of_second->text();
  waits.join();
  EXPECT_FALSE(error) << error->text();
  expectSums(members);
}

TEST(Reconfigurable, AStrangerIsNotLetInAndEndsNothing) {
  auto made = processes(2);
  const std::vector<Process*> members = {made[0].get(), made[1].get()};
  const std::vector<std::string> handles = handlesOf(members);
  expectMet(meetAll(members, 1, handles));
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(answerAt(*made[0], newProcessId(), newProcessId(), "x", 1, 0), endpoint_answer::kGone);
  }
  expectSums(members);
  expectMet(meetAll(members, 2, handles));
  expectSums(members);
}

TEST(Reconfigurable, RanksOfAJobKeepItsNumbersWhenMembersGo) {
  const auto made = processesOfJob({2, 5, 7});
  const std::vector<Process*> all = {made[0].get(), made[1].get(), made[2].get()};
  for (const Outcome& outcome : meetAll(all, 1, handlesOf(all))) {
    ASSERT_FALSE(outcome.error) << outcome.error->text();
  }
  EXPECT_EQ(all[0]->group->identity().job.numbers(), (std::vector<int>{2, 5, 7}));
  const std::vector<Process*> rest = {all[1], all[2]};
  for (const Outcome& outcome : meetAll(rest, 2, handlesOf(rest))) {
    ASSERT_FALSE(outcome.error) << outcome.error->text();
  }
  EXPECT_EQ(all[2]->group->identity().job.numbers(), (std::vector<int>{5, 7}));
  EXPECT_EQ(all[2]->group->identity().jobRank(), 7);
  // One of the members does not come.
  const auto error = meetAll({all[1]}, 3, handlesOf(rest), 500).front().error;
  ASSERT_TRUE(error);
  EXPECT_EQ(error->rank, 5) << error->text();
  EXPECT_EQ(error->peer, 7) << error->text();
  EXPECT_NE(error->summary.find("rank 7 of the new group"), std::string::npos) << error->text();
}

TEST(Reconfigurable, RanksOfAJobHaveItsNumbersInAnyOrder) {
  const auto made = processesOfJob({2, 5, 7});
  const std::vector<Process*> all = {made[0].get(), made[2].get(), made[1].get()};
  expectMet(meetAll(all, 1, handlesOf(all)));
  for (const Process* member : all) {
    EXPECT_EQ(member->group->identity().job.numbers(), (std::vector<int>{2, 7, 5}));
  }
}

TEST(Reconfigurable, MembersOfOtherJobsWhoseNumbersSayNothingAreRefused) {
  const auto made = processesOfJob({2, 5});
  const auto others = processesOfJob({5});
  Process without;
  const std::string mine = made[1]->members->handle();
  for (const Process* stranger : std::array<const Process*, 2>{others[0].get(), &without}) {
    const auto error = made[1]->meet(1, {mine, stranger->members->handle()});
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code, ErrorCode::InvalidArgument) << error->text();
    // An agreement has its own names for them.
    const auto plan =
        made[1]->members->plan(stranger == &without ? 2 : 3, {mine, stranger->members->handle()}, JobRanks());
    EXPECT_EQ(plan.jobRank(), 0);
  }
  const auto free = processesOfJob({0}); // of a job of its own, with a number that nobody has
  const std::vector<Process*> members = {made[1].get(), free[0].get()};
  expectMet(meetAll(members, 4, handlesOf(members)));
  EXPECT_EQ(free[0]->group->identity().jobRank(), 0);
}

} // namespace
} // namespace pycomm
