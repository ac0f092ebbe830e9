#include "base/usable_cores.h"

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

/// A folder in which control groups seem to be mounted.
class ControlGroups {
 public:
  void write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = root_.path() / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text << "\n";
  }
  [[nodiscard]] unsigned cores(const std::string& memberships) const {
    return quotaCores(memberships, root_.path().string());
  }

 private:
  testing::TempFolder root_;
};

TEST(UsableCores, AQuotaOfVersion2IsThatOfTheStrictestGroupAbove) {
  const ControlGroups groups;
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
  const ControlGroups groups;
  groups.write("cpu.max", "300000 100000");
  EXPECT_EQ(groups.cores("0::/\n"), 3U);
  EXPECT_EQ(groups.cores("0::/../../of/the/host\n"), 3U);
}

TEST(UsableCores, AQuotaOfVersion1) {
  const ControlGroups groups;
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

} // namespace
} // namespace pycomm
