// One operation with much work of its own on the data loop does not hold up those of other groups.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/ranks.h"

namespace pycomm::testing {
namespace {

constexpr int64_t kOwnNbytes = 256 << 20;
// The data loop's turns while such an operation runs are counted, and not the time: a busy machine has fewer of them, but not 50 times fewer.
// Each small operation takes some turns on both ranks.
constexpr int kLeastMeanwhile = 10;

void overTcp(Group::Config& config) {
  config.transport = Transport::Tcp;
}

/// Two ranks. Each starts the call, and runs small operations of another group until it has ended. At least so many fit in between.
void runSmallOnesMeanwhile(const std::function<Group::Call(int rank)>& callOf) {
  SharedStore store;
  runRanks(
      2,
      [&](Rank& self) {
        Group::Config config = groupConfig(self.rank, 2, "small");
        overTcp(config);
        const auto small = Group::join(self.engine, store, config);
        const auto runSmall = [&] {
          const auto operation = small->start(barrierCall());
          ASSERT_TRUE(small->wait(*operation, Deadline::after(20000)));
          ASSERT_FALSE(operation->error()) << operation->error()->text();
        };
        runSmall();
        const auto large = self.group.start(callOf(self.rank));
        // The same number on both ranks, no matter which ends first.
        int meanwhile = 0;
        for (; !large->done() && meanwhile < kLeastMeanwhile; ++meanwhile) {
          runSmall();
        }
        EXPECT_GE(meanwhile, kLeastMeanwhile) << "rank " << self.rank;
        for (; meanwhile < kLeastMeanwhile; ++meanwhile) {
          runSmall();
        }
        ASSERT_TRUE(self.group.wait(*large, Deadline::after(60000)));
        EXPECT_FALSE(large->error()) << large->error()->text();
        small->close();
      },
      overTcp);
}

// An exchange of embeddings that stays with this rank, but for one byte.
TEST(OwnPart, ItsCopyDoesNotHoldUpOthers) {
  std::vector<std::byte> input(static_cast<size_t>(kOwnNbytes) + 1, std::byte{1});
  std::vector<std::byte> outputs[2] = {
      std::vector<std::byte>(input.size()), std::vector<std::byte>(input.size())}; // in memory before it begins
  runSmallOnesMeanwhile([&](int rank) {
    Group::Call call;
    call.schedule.kind = Collective::AllToAll;
    call.schedule.dtype = DType::UInt8;
    call.schedule.counts = {1, 1};
    call.schedule.counts[static_cast<size_t>(rank)] = kOwnNbytes;
    call.schedule.recv_counts = call.schedule.counts;
    call.input = viewOf(input);
    call.output = {outputs[rank].data(), outputs[rank].size()};
    call.deadline = Deadline::after(60000);
    return call;
  });
  EXPECT_EQ(outputs[0], input);
  EXPECT_EQ(outputs[1], input);
}

} // namespace
} // namespace pycomm::testing
