#include "engine/survive/peers_file.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "armed_faults.h"
#include "temp_folder.h"

namespace pycomm {
namespace {

std::string textOf(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

std::ptrdiff_t filesIn(const testing::TempFolder& folder) {
  return std::distance(std::filesystem::directory_iterator(folder.path()), {});
}

TEST(PeersFile, NobodyWaitsForTheDiskAndTheLastTextCounts) {
  const testing::TempFolder folder;
  const std::string path = (folder.path() / "peers").string();
  PeersFile file(path, "draft");
  {
    const testing::ArmedFaults disk("survive.peers:1+:hold");
    file.write("one\n");
    testing::ArmedFaults::waitUntilStruck();
    file.write("two\n");
    file.write("three\n");
    EXPECT_FALSE(file.flush(Deadline::after(0)));
    EXPECT_EQ(testing::ArmedFaults::strikes(), 1) << "the disk still holds";
  }
  EXPECT_TRUE(file.flush(Deadline::after(60000)));
  EXPECT_EQ(textOf(path), "three\n");
  EXPECT_EQ(filesIn(folder), 1);
  file.write("four\n");
  EXPECT_TRUE(file.flush(Deadline::after(60000)));
  EXPECT_EQ(textOf(path), "four\n");
}

TEST(PeersFile, ReplacesNothingOnceItIsClosed) {
  const testing::TempFolder folder;
  const std::string path = (folder.path() / "peers").string();
  PeersFile file(path, "draft");
  {
    const testing::ArmedFaults disk("survive.peers:1+:hold");
    file.write("late\n");
    testing::ArmedFaults::waitUntilStruck();
    file.close(Deadline::after(0)); // does not wait for the disk
    file.write("later\n");
    EXPECT_EQ(testing::ArmedFaults::strikes(), 1) << "the disk still holds";
  }
  EXPECT_TRUE(file.flush(Deadline::after(60000)));
  EXPECT_EQ(filesIn(folder), 0);
}

TEST(PeersFile, AFolderThatIsNotThereIsNoError) {
  const testing::TempFolder folder;
  PeersFile file((folder.path() / "none" / "peers").string(), "draft");
  file.write("text\n");
  EXPECT_TRUE(file.flush(Deadline::after(60000))); // and one line in the log
  EXPECT_EQ(filesIn(folder), 0);
}

} // namespace
} // namespace pycomm
