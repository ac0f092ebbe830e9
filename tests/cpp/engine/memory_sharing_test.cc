// When ranks share no memory, and what they say about it. Groups that do share it are in group_reach_test.cc and
// group_shared_links_test.cc.
#include "engine/memory_sharing.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "engine/ranks.h"
#include "engine/rosters.h"

namespace pycomm::testing {
namespace {

/// A store that nobody may ask: what it would answer is known alike on all ranks without it.
class NoStore final : public Store {
 public:
  void set(const std::string&, const std::string&) override {
    ADD_FAILURE() << "the store was asked";
  }
  std::string get(const std::string&, Deadline) override {
    ADD_FAILURE() << "the store was asked";
    return "";
  }
  bool has(const std::string&) override {
    ADD_FAILURE() << "the store was asked";
    return false;
  }
  int64_t add(const std::string&, int64_t) override {
    ADD_FAILURE() << "the store was asked";
    return 0;
  }
};

/// Why rank 0 of ranks on these hosts shares no memory. It asks no other rank.
std::string share(const std::vector<std::string>& hosts, Transport transport) {
  Engine engine;
  NoStore store;
  const Roster roster = rosterOf(0, hosts);
  AbortToken failed;
  Planes planes(roster.identity, engine.dataLoop(), engine.control(), Planes::Events());
  MemorySharing sharing(engine, store, roster, planes, failed);
  const std::string why = sharing.share(transport, Deadline::after(10000));
  EXPECT_EQ(planes.host(), nullptr);
  return why;
}

TEST(MemorySharing, OneRankWantsNone) {
  EXPECT_EQ(share({"alpha"}, Transport::Auto), "");
  EXPECT_EQ(share({"alpha"}, Transport::SharedMemory), "");
}

TEST(MemorySharing, TcpWantsNone) {
  EXPECT_EQ(share({"alpha", "alpha"}, Transport::Tcp), "");
}

TEST(MemorySharing, RanksThatAreEachAloneOnTheirHostShareNone) {
  EXPECT_EQ(share({"alpha", "beta"}, Transport::Auto), "the ranks are on several hosts");
}

TEST(MemorySharing, SeveralHostsCannotHaveItEvenIfItIsAskedFor) {
  for (const std::vector<std::string>& hosts :
       {std::vector<std::string>{"alpha", "beta"}, {"alpha", "alpha", "beta"}}) {
    try {
      static_cast<void>(share(hosts, Transport::SharedMemory));
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.record().code, ErrorCode::Unsupported);
      EXPECT_EQ(error.record().summary, "The ranks cannot share memory: the ranks are on several hosts.");
      EXPECT_EQ(error.record().hint, "use transport='auto', which falls back to sockets");
    }
  }
}

} // namespace
} // namespace pycomm::testing
