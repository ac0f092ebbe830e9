// A child of fork() has neither the threads of its parent's groups nor their shared memory: every entry of Group refuses, or does nothing.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <string>

#include "ranks.h"
#include "transport/process.h"

namespace pycomm::testing {
namespace {

bool refuses(const std::function<void()>& entry) {
  try {
    entry();
  } catch (const Error& error) {
    return error.record().code == ErrorCode::Forked;
  }
  return false;
}

class GroupInAChild : public ::testing::TestWithParam<Transport> {};

TEST_P(GroupInAChild, EveryEntryRefuses) {
  std::atomic<bool> tried{false};
  runRanks(
      2,
      [&](Rank& self) {
        const Deadline most = Deadline::after(120000);
        std::vector<float> values(8, 1);
        Group::Call call = allReduceCall(values, most);
        call.held = true;
        const auto held = self.group.start(call);
        Group& group = self.group;
        const std::vector<std::pair<std::string, std::function<void()>>> entries{
            {"start", [&] { static_cast<void>(group.start(barrierCall())); }},
            {"release", [&] { group.release(held); }},
            {"release of pieces", [&] { group.release(held, 1); }},
            {"follow", [&] { static_cast<void>(group.follow(barrierCall())); }},
            {"keepsParts", [&] { static_cast<void>(group.keepsParts(call.schedule)); }},
            {"wait", [&] { static_cast<void>(group.wait(*held, Deadline::after(100))); }},
            {"poll", [&] { static_cast<void>(group.poll(*held)); }},
            {"usage", [&] { static_cast<void>(group.usage()); }},
        };
        // One rank forks while the other's thread rests: a sanitizer's allocator may be locked in the child of a fork for ever, if another
        // thread allocates meanwhile.
        for (; self.rank == 1 && !tried && !most.expired();) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        if (self.rank == 0) {
          for (const auto& entry : entries) {
            EXPECT_TRUE(Process([&] { return refuses(entry.second); }).join()) << entry.first;
          }
          ErrorRecord reason;
          EXPECT_TRUE(Process([&] {
                        group.followedEnded(held, std::nullopt);
                        group.abort(reason);
                        group.close();
                        return true;
                      }).join())
              << "what throws nothing does nothing";
        }
        tried = true;
        group.release(held);
        EXPECT_TRUE(group.wait(*held, most));
        EXPECT_FALSE(held->error());
      },
      [](Group::Config& config) { config.transport = GetParam(); });
}

INSTANTIATE_TEST_SUITE_P(
    Transports,
    GroupInAChild,
    ::testing::Values(Transport::SharedMemory, Transport::Tcp),
    [](const auto& each) { return each.param == Transport::Tcp ? "Tcp" : "SharedMemory"; });

} // namespace
} // namespace pycomm::testing
