#include "base/process_limits.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

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
  [[nodiscard]] unsigned cores(const std::string& memberships) const {
    return quotaCores(memberships, root_.path().string());
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

TEST(UsableCores, AQuotaOfVersion2IsThatOfTheStrictestGroupAbove) {
  const Limits groups;
  EXPECT_EQ(groups.cores("0::/job/rank\n"), 0U);
  groups.write("job/rank/cpu.max", "max 100000");
  EXPECT_EQ(groups.cores("0::/job/rank\n"), 0U);
  groups.write("job/cpu.max", "400000 100000");
  EXPECT_EQ(groups.cores("0::/job/rank\n"), 4U);
  groups.write("job/rank/cpu.max", "250000 100000");
  EXPECT_EQ(groups.cores("0::/job/rank\n"), 2U);
  groups.write("job/rank/cpu.max", "50000 100000");
  EXPECT_EQ(groups.cores("0::/job/rank\n"), 1U);
  EXPECT_EQ(groups.cores("0::/other\n"), 0U);
}

TEST(UsableCores, AContainerSeesItsQuotaAtTheRootOfTheMount) {
  const Limits groups;
  groups.write("cpu.max", "300000 100000");
  EXPECT_EQ(groups.cores("0::/\n"), 3U);
  EXPECT_EQ(groups.cores("0::/../../of/the/host\n"), 3U);
}

TEST(UsableCores, AQuotaOfVersion1) {
  const Limits groups;
  const std::string memberships = "12:memory:/job\n4:cpu,cpuacct:/job\n1:name=systemd:/\n0::/\n";
  groups.write("cpu,cpuacct/job/cpu.cfs_quota_us", "-1");
  groups.write("cpu,cpuacct/job/cpu.cfs_period_us", "100000");
  EXPECT_EQ(groups.cores(memberships), 0U);
  groups.write("cpu,cpuacct/job/cpu.cfs_quota_us", "200000");
  EXPECT_EQ(groups.cores(memberships), 2U);
  groups.write("memory/job/cpu.max", "100000 100000"); // of another hierarchy
  EXPECT_EQ(groups.cores(memberships), 2U);
}

TEST(UsableCores, NoMoreThanTheAffinityAllows) {
  std::thread([] {
    cpu_set_t before;
    ASSERT_EQ(::sched_getaffinity(0, sizeof before, &before), 0);
    EXPECT_LE(usableCores(), static_cast<unsigned>(CPU_COUNT(&before)));
    cpu_set_t one;
    CPU_ZERO(&one);
    for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++cpu) {
      if (CPU_ISSET(cpu, &before)) {
        CPU_SET(cpu, &one);
      }
    }
    ASSERT_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
    EXPECT_EQ(usableCores(), 1U);
  }).join();
}

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
