#include "base/memory_headroom.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "temp_folder.h"

namespace pycomm {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kMuch = ~uint64_t{0};

/// A folder in which control groups seem to be mounted, and a host with 1000 MiB available.
class Limits {
 public:
  void write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = root_.path() / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text << "\n";
  }
  void write(const std::string& path, uint64_t mebibytes) const {
    write(path, std::to_string(mebibytes * kMiB));
  }
  [[nodiscard]] uint64_t mebibytes(const std::string& memberships) const {
    return memoryHeadroom(kMuch, memberships, root_.path().string(), meminfo).nbytes / kMiB;
  }
  [[nodiscard]] std::string limit(const std::string& memberships) const {
    return memoryHeadroom(kMuch, memberships, root_.path().string(), meminfo).limit;
  }
  [[nodiscard]] std::string folder(const std::string& path) const {
    return (root_.path() / path).string();
  }

  std::string meminfo = "MemTotal: 2048000 kB\nMemFree: 1000 kB\nMemAvailable: 1024000 kB\nSwapFree: 0 kB\n";

 private:
  testing::TempFolder root_;
};

TEST(MemoryHeadroom, WithoutALimitItIsTheHosts) {
  Limits limits;
  EXPECT_EQ(limits.mebibytes("0::/job\n"), 1000U);
  EXPECT_EQ(limits.limit("0::/job\n"), "the host's memory");
  limits.write("job/memory.max", "max");
  limits.write("memory/job/memory.limit_in_bytes", "9223372036854771712");
  EXPECT_EQ(limits.mebibytes("0::/job\n4:memory:/job\n"), 1000U);
  limits.meminfo = "MemAvailable: 1024000 kB\nSwapFree: 51200 kB\n";
  EXPECT_EQ(limits.mebibytes("0::/job\n"), 1050U);
  limits.meminfo = ""; // a sandbox
  EXPECT_TRUE(memoryHeadroom(kMuch, "", "/nowhere", "").has(~uint64_t{0}));
}

TEST(MemoryHeadroom, ALimitOfVersion2IsThatOfTheStrictestGroupAbove) {
  const Limits limits;
  limits.write("job/rank/memory.max", 500);
  limits.write("job/rank/memory.current", 100);
  EXPECT_EQ(limits.mebibytes("0::/job/rank\n"), 400U);
  limits.write("job/memory.max", 600);
  limits.write("job/memory.current", 450);
  EXPECT_EQ(limits.mebibytes("0::/job/rank\n"), 150U);
  EXPECT_EQ(limits.limit("0::/job/rank\n"), "the memory limit in " + limits.folder("job"));
  // The kernel gets the page cache back. Of it, "file" has shared memory as well, which stays.
  limits.write(
      "job/memory.stat",
      "anon 1\nfile 209715200\ninactive_file 10485760\nactive_file 10485760\nslab_reclaimable 10485760");
  EXPECT_EQ(limits.mebibytes("0::/job/rank\n"), 180U);
  limits.write("job/memory.current", 700);
  EXPECT_EQ(limits.mebibytes("0::/job/rank\n"), 0U);
}

TEST(MemoryHeadroom, InAContainerTheGroupIsAtTheRootOfTheMount) {
  const Limits limits;
  limits.write("memory/memory.limit_in_bytes", 300);
  limits.write("memory/memory.usage_in_bytes", 120);
  limits.write("memory/memory.stat", "inactive_file 1\ntotal_inactive_file 10485760\ntotal_active_file 0");
  EXPECT_EQ(limits.mebibytes("5:cpu:/x\n4:memory:/docker/0123\n"), 190U);
}

TEST(MemoryHeadroom, SwapCountsAsFarAsTheGroupMayUseIt) {
  Limits limits;
  limits.meminfo = "MemAvailable: 1024000 kB\nSwapFree: 204800 kB\n"; // 200 MiB
  limits.write("job/memory.max", 100);
  limits.write("job/memory.current", 90);
  EXPECT_EQ(limits.mebibytes("0::/job\n"), 210U);
  limits.write("job/memory.swap.max", 50);
  limits.write("job/memory.swap.current", 20);
  EXPECT_EQ(limits.mebibytes("0::/job\n"), 40U);
  limits.write("memory/job/memory.limit_in_bytes", 100);
  limits.write("memory/job/memory.usage_in_bytes", 90);
  EXPECT_EQ(limits.mebibytes("4:memory:/job\n"), 210U);
  limits.write("memory/job/memory.memsw.limit_in_bytes", 120);
  limits.write("memory/job/memory.memsw.usage_in_bytes", 95);
  EXPECT_EQ(limits.mebibytes("4:memory:/job\n"), 25U);
}

} // namespace
} // namespace pycomm
