#include "transport/net/host_identity.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <string>

#include "transport/process.h"

namespace pycomm {
namespace {

using testing::Process;

TEST(HostIdentity, IsTheSameInAllProcessesOfAHost) {
  const HostIdentity mine = HostIdentity::ofThisProcess();
  EXPECT_FALSE(mine.boot_id.empty());
  EXPECT_FALSE(mine.hostname.empty());
  EXPECT_TRUE(Process([&] { return HostIdentity::ofThisProcess() == mine; }).join());
}

TEST(HostIdentity, DiffersInEachPart) {
  const HostIdentity mine = HostIdentity::ofThisProcess();
  HostIdentity other = mine;
  other.boot_id += "x";
  EXPECT_NE(other, mine);
  other = mine;
  other.network_namespace += 1;
  EXPECT_NE(other, mine);
  other = mine;
  other.hostname += "x";
  EXPECT_NE(other, mine);
}

TEST(HostIdentity, SurvivesTheWire) {
  const HostIdentity mine = HostIdentity::ofThisProcess();
  const auto read = HostIdentity::fromWireText(mine.wireText());
  ASSERT_TRUE(read);
  EXPECT_EQ(*read, mine);
  for (const std::string& text :
       {std::string(),
        std::string("a/b"),
        std::string("a/b/c"),
        std::string("a/1/"),
        std::string("a/1/b/c"),
        std::string("a/99999999999999999999/b"),
        std::string("a/1/b c"),
        std::string(1000, 'a') + "/1/b"}) {
    EXPECT_FALSE(HostIdentity::fromWireText(text)) << text;
  }
}

TEST(ProcessIdentity, TellsProcessesApart) {
  const ProcessIdentity mine = ProcessIdentity::ofThisProcess();
  EXPECT_EQ(mine.pid, ::getpid());
  EXPECT_GT(mine.start_ticks, 0U);
  EXPECT_TRUE(mine == ProcessIdentity::ofThisProcess());
  EXPECT_TRUE(
      Process([&] { return !(ProcessIdentity::ofThisProcess() == mine) && mine.life() == Life::Lives; }).join());
  const auto read = ProcessIdentity::fromWireText(mine.wireText());
  ASSERT_TRUE(read);
  EXPECT_TRUE(*read == mine);
  EXPECT_FALSE(ProcessIdentity::fromWireText("1/2"));
  EXPECT_FALSE(ProcessIdentity::fromWireText("1/2/x"));
  EXPECT_FALSE(ProcessIdentity::fromWireText("99999999999/2/3"));
}

TEST(ProcessIdentity, KnowsThatAProcessEnded) {
  Process child([] { return true; });
  ProcessIdentity identity = ProcessIdentity::ofThisProcess();
  identity.pid = child.pid();
  ASSERT_TRUE(child.join());
  EXPECT_EQ(identity.life(), Life::Ended);
  // The pid of a living process that started at another time: it was given out again.
  identity.pid = ::getpid();
  identity.start_ticks += 1;
  EXPECT_EQ(identity.life(), Life::Ended);
  // A pid of another namespace says nothing.
  identity.pid_namespace += 1;
  EXPECT_EQ(identity.life(), Life::Unknown);
  // A sandbox that hides when processes started.
  identity = ProcessIdentity::ofThisProcess();
  identity.start_ticks = 0;
  EXPECT_EQ(identity.life(), Life::Unknown);
}

TEST(ProcessIdentity, KnowsThatAProcessEndedWhichNobodyHasReaped) {
  testing::SharedFlag start_ticks;
  const Process zombie([&] {
    start_ticks.raise(static_cast<int64_t>(ProcessIdentity::ofThisProcess().start_ticks));
    return true;
  });
  ASSERT_FALSE(zombie.runsOn(10000));
  ProcessIdentity identity = ProcessIdentity::ofThisProcess();
  identity.pid = zombie.pid();
  identity.start_ticks = static_cast<uint64_t>(start_ticks.value());
  EXPECT_EQ(identity.life(), Life::Ended);
}

// Until somebody mounts it anew, /proc shows the pids of the outer namespace.
TEST(ProcessIdentity, DoesNotTakeItsPidForOneOfAnOuterNamespace) {
  if (::geteuid() != 0) {
    GTEST_SKIP() << "needs root";
  }
  EXPECT_TRUE(Process([] {
                if (::unshare(CLONE_NEWPID) != 0) {
                  return false;
                }
                return Process([] { return ProcessIdentity::ofThisProcess().life() == Life::Unknown; }).join();
              }).join());
}

} // namespace
} // namespace pycomm
