// A rank that crashes writes its own memory to the core file, and none that it shares with other ranks: their heaps are as large as the
// machine's memory, and are mapped in every rank of a host.
#include "core_file.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "ranks.h"
#include "transport/directory_store.h"
#include "transport/process.h"

namespace pycomm::testing {
namespace {

constexpr size_t kCrashNumel = size_t{1} << 18;

Group::Config sharedConfig(int rank) {
  Group::Config config = groupConfig(rank, 2, "crash");
  config.transport = Transport::SharedMemory;
  return config;
}

/// Integers, so that no sum is equal to a part of the pattern.
bool allReduce(Group& group, void* values) {
  Group::Call call;
  call.schedule.kind = Collective::AllReduce;
  call.schedule.dtype = DType::Int32;
  call.schedule.reduce_op = ReduceOp::Sum;
  call.schedule.numel = static_cast<int64_t>(kCrashNumel);
  call.input = call.output = BufferView{static_cast<std::byte*>(values), kCrashNumel * sizeof(int32_t)};
  call.deadline = Deadline::after(20000);
  const auto operation = group.start(call);
  return operation->wait(call.deadline) && !operation->error();
}

/// Mappings of shared memory of ours in this process, and how many of them a core file would hold.
std::pair<int, int> sharedMappings() {
  int all = 0;
  int dumped = 0;
  bool ours = false;
  std::ifstream maps("/proc/self/smaps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("/memfd:pycomm") != std::string::npos) {
      ours = line.find("/memfd:pycomm-alive") == std::string::npos; // one page of numbers
    } else if (line.find("VmFlags:") == 0 && ours) {
      ++all;
      dumped += line.find(" dd") == std::string::npos ? 1 : 0;
      ours = false;
    }
  }
  return {all, dumped};
}

void fill(void* tensor, const std::string& pattern) {
  for (size_t at = 0; at + pattern.size() <= kCrashNumel * sizeof(int32_t); at += pattern.size()) {
    std::memcpy(static_cast<std::byte*>(tensor) + at, pattern.data(), pattern.size());
  }
}

/// Rank 1, until it is killed: its pattern is in its heap and went through the memory of the group, and rank 0 has both mapped.
bool beThePeer(Store& store) {
  Engine engine;
  const auto group = Group::join(engine, store, sharedConfig(1));
  void* tensor = engine.heap()->allocate(kCrashNumel * sizeof(int32_t));
  fill(tensor, patternOf(::getpid()));
  std::vector<int32_t> staged(kCrashNumel);
  fill(staged.data(), patternOf(::getpid()));
  return allReduce(*group, staged.data()) && SharedFlag().wait(60000);
}

TEST(CoreFile, MappingsThatARankSharesWithOthersAreMarkedToBeLeftOut) {
  DirectoryStore store;
  const Process peer([&] { return beThePeer(store); });
  Engine engine;
  const auto group = Group::join(engine, store, sharedConfig(0));
  std::vector<int32_t> values(kCrashNumel, 12345);
  ASSERT_TRUE(allReduce(*group, values.data()));
  const auto [all, in_core] = sharedMappings();
  EXPECT_GE(all, 3) << "the memory of the group, and both heaps";
  EXPECT_EQ(in_core, 0);
}

TEST(CoreFile, OfARankHoldsNothingThatOnlyItsPeerWrote) {
  DirectoryStore store;
  const Process peer([&] { return beThePeer(store); });
  SharedFlag summed;
  const CoreFile core([&] {
    Engine engine;
    const auto group = Group::join(engine, store, sharedConfig(0));
    std::vector<int32_t> values(kCrashNumel, 12345);
    if (allReduce(*group, values.data())) {
      summed.raise();
      CoreFile::recordResident();
      std::abort();
    }
  });
  ASSERT_EQ(summed.value(), 1) << "nothing went through the memory of the group";
  if (!core.unavailable().empty()) {
    GTEST_SKIP() << core.unavailable();
  }
  EXPECT_LE(core.nbytes(), core.residentNbytes() + CoreFile::kAllowedNbytes);
  EXPECT_TRUE(core.contains(CoreFile::kMark));
  EXPECT_FALSE(core.contains(patternOf(peer.pid())));
}

} // namespace
} // namespace pycomm::testing
