#include "transport/secure/secret.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <string>

#include "base/error.h"
#include "temp_folder.h"
#include "transport/error_matchers.h"

namespace pycomm {
namespace {

using testing::errorOf;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::TempFolder;

// 32 bytes 0, 1, 2, … 31; made with Python's base64, hashlib and hmac.
constexpr const char* kText = "pycomm-secret-1:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh86oZq";
constexpr const char* kId = "be7c1379";

std::string contentOf(const std::string& path) {
  std::ostringstream out;
  out << std::ifstream(path).rdbuf();
  return out.str();
}

std::string written(const TempFolder& folder, const std::string& text, mode_t mode = 0600) {
  std::string path = folder.path().string() + "/secret";
  std::ofstream(path) << text;
  EXPECT_EQ(::chmod(path.c_str(), mode), 0);
  return path;
}

TEST(Secret, ReadsTheFormat) {
  EXPECT_EQ(Secret::parse(kText, "it").keyId(), kId);
  EXPECT_EQ(Secret::parse(std::string("  ") + kText + " \r\n", "it").keyId(), kId); // as editors and Windows leave it
}

TEST(Secret, DerivesAnotherKeyForEachPurpose) {
  const Secret secret = Secret::parse(kText, "it");
  // HKDF-SHA-256, made with Python's hmac.
  EXPECT_EQ(
      hexOf(secret.derive("pycomm 1 store").view()),
      "dc281a9a287aeb0099d5e25df0d590781203945b383dc9dee90a5ddb6c67e991");
  EXPECT_NE(secret.derive("a").view(), secret.derive("b").view());
}

TEST(Secret, RefusesEveryOtherTextAndPrintsNothingOfIt) {
  const std::string good = kText;
  std::string changed = good;
  changed[30] = changed[30] == 'A' ? 'B' : 'A';
  std::string other_bits = good; // the 43rd character has two bits that count for nothing
  other_bits[58] = '9';
  const std::pair<std::string, std::string> cases[] = {
      {"", "it is empty"},
      {" \n\n", "it is empty"},
      {"correct horse battery staple", "does not begin with \"pycomm-secret-1:\""},
      {"\xef\xbb\xbf" + good, "does not begin with"}, // a byte order mark
      {"<html>", "does not begin with"},
      {good.substr(0, 44), "(line 1, 44 of 63 characters: cut off in copying?)"},
      {good.substr(0, 5), "(line 1, 5 of 63 characters: cut off in copying?)"},
      {good + "=", "(line 1, 64 of 63 characters: something was added)"},
      {good + "\n" + good, "more than one line"},
      {changed, "do not fit"},
      {other_bits, "do not fit"},
      {good.substr(0, 62) + "*", "do not fit"},
      {good.substr(0, 20) + std::string(1, '\0') + good.substr(21), "do not fit"},
  };
  for (const auto& [text, why] : cases) {
    const ErrorRecord record = errorOf([&, text = text] { (void)Secret::parse(text, "it"); });
    EXPECT_EQ(record.code, ErrorCode::InvalidArgument);
    EXPECT_THAT(record.summary, HasSubstr(why));
    EXPECT_THAT(record.text(), Not(HasSubstr("AAECAwQ")));
    EXPECT_THAT(record.text(), Not(HasSubstr("horse")));
  }
}

TEST(Secret, EveryChangedCharacterIsFound) {
  for (size_t i = 0; i < std::string(kText).size(); ++i) {
    std::string text = kText;
    text[i] = text[i] == 'x' ? 'y' : 'x';
    EXPECT_EQ(errorOf([&] { (void)Secret::parse(text, "it"); }).code, ErrorCode::InvalidArgument) << i;
  }
}

TEST(Secret, GeneratesADifferentOneEachTimeAndReadsItBack) {
  const TempFolder folder;
  const Secret first = Secret::generate();
  EXPECT_NE(first.keyId(), Secret::generate().keyId());
  const std::string path = folder.path().string() + "/secret";
  first.writeFile(path);
  struct stat status{};
  ASSERT_EQ(::stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0600U);
  EXPECT_EQ(contentOf(path).size(), 64U); // and a newline
  const Secret again = Secret::readFile(path);
  EXPECT_EQ(again.keyId(), first.keyId());
  EXPECT_EQ(again.derive("x").view(), first.derive("x").view());
}

TEST(Secret, OverwritesNoFile) {
  const TempFolder folder;
  const std::string path = written(folder, "another");
  const ErrorRecord record = errorOf([&] { Secret::generate().writeFile(path); });
  EXPECT_EQ(record.code, ErrorCode::InvalidArgument);
  EXPECT_THAT(record.summary, HasSubstr(path + " exists already"));
  EXPECT_EQ(contentOf(path), "another");
  const std::string dangling = folder.path().string() + "/link";
  ASSERT_EQ(::symlink((folder.path().string() + "/elsewhere").c_str(), dangling.c_str()), 0);
  EXPECT_EQ(errorOf([&] { Secret::generate().writeFile(dangling); }).code, ErrorCode::InvalidArgument);
  EXPECT_NE(::access((folder.path().string() + "/elsewhere").c_str(), F_OK), 0);
}

TEST(SecretFile, FollowsLinksAsKubernetesMakesThem) {
  const TempFolder folder;
  (void)written(folder, kText);
  ASSERT_EQ(::symlink("secret", (folder.path().string() + "/link").c_str()), 0);
  EXPECT_EQ(Secret::readFile(folder.path().string() + "/link").keyId(), kId);
}

TEST(SecretFile, RefusesWhatIsNoPrivateRegularFile) {
  const TempFolder folder;
  const std::string missing = folder.path().string() + "/missing";
  const std::string fifo = folder.path().string() + "/fifo";
  const std::string dangling = folder.path().string() + "/dangling";
  const std::string large = folder.path().string() + "/large";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  ASSERT_EQ(::symlink(missing.c_str(), dangling.c_str()), 0);
  std::ofstream(large) << kText << std::string(5000, ' ');
  ASSERT_EQ(::chmod(large.c_str(), 0600), 0);
  const std::pair<std::string, std::string> cases[] = {
      {missing, "ENOENT"},
      {dangling, "ENOENT"},
      {fifo, "is not a regular file"},
      {folder.path().string(), "is not a regular file"},
      {"/dev/zero", "is not a regular file"},
      {large, "more than 4096 bytes"},
  };
  const TimePoint begin = Clock::now();
  for (const auto& [path, why] : cases) {
    const ErrorRecord record = errorOf([&, path = path] { (void)Secret::readFile(path); });
    EXPECT_EQ(record.code, ErrorCode::InvalidArgument) << path;
    EXPECT_THAT(record.text(), HasSubstr(why));
    EXPECT_THAT(record.text(), HasSubstr(path));
  }
  // Not to make a second secret where another host has one.
  EXPECT_EQ(
      errorOf([&] { (void)Secret::readFile(missing); }).hint,
      std::string(kHowToCopySecret) + ". Only if no host has one: python -m pycomm secret --generate");
  EXPECT_WITHIN_MS(testing::elapsedMs(begin), 5000);
}

// As the user who runs the test, root or not.
TEST(SecretFile, RefusesAFileThatOthersMayChange) {
  for (const mode_t mode : {0602, 0620, 0666, 0777}) {
    const TempFolder folder;
    const std::string path = written(folder, kText, mode);
    const ErrorRecord record = errorOf([&] { (void)Secret::readFile(path); });
    EXPECT_EQ(record.code, ErrorCode::InvalidArgument);
    EXPECT_THAT(record.summary, HasSubstr("other users may"));
    EXPECT_THAT(record.hint, HasSubstr("chmod 6"));
  }
}

TEST(SecretFile, AnotherUsersFileIsRefused) {
  if (::geteuid() != 0) {
    GTEST_SKIP() << "only root can give a file away";
  }
  const TempFolder folder;
  const std::string path = written(folder, kText);
  ASSERT_EQ(::chown(path.c_str(), 12345, 12345), 0);
  EXPECT_THAT(
      errorOf([&] { (void)Secret::readFile(path); }).summary,
      HasSubstr("belongs to user 12345, and this process is user 0"));
}

TEST(SecretFile, TheRuleOfRights) {
  constexpr uid_t kMe = 1000;
  constexpr uint64_t kDisk = EXT4_SUPER_MAGIC;
  struct Case {
    uid_t owner;
    mode_t mode;
    uint64_t file_system;
    bool private_enough;
  };
  const Case cases[] = {
      {kMe, 0600, kDisk, true},
      {kMe, 0400, kDisk, true},
      {kMe, 0700, kDisk, true},
      {kMe, 0640, kDisk, false},
      {kMe, 0604, kDisk, false},
      {kMe, 0644, kDisk, false},
      {kMe, 0777, MSDOS_SUPER_MAGIC, false},
      {kMe, 0644, TMPFS_MAGIC, false}, // anybody can make a file there
      {kMe, 0600, NFS_SUPER_MAGIC, true}, // with a warning
      {0, 0600, kDisk, true},
      {0, 0640, kDisk, true}, // Kubeflow's keys
      {0, 0440, kDisk, true}, // Kubernetes with fsGroup
      {0, 0660, kDisk, false},
      {0, 0644, kDisk, false},
      {0, 0444, kDisk, false},
      {0, 0650, kDisk, false},
      {0, 0644, TMPFS_MAGIC, true}, // Kubernetes' default
      {0, 0444, TMPFS_MAGIC, true},
      {0, 0664, TMPFS_MAGIC, false},
      {0, 0646, TMPFS_MAGIC, false},
      {1001, 0600, kDisk, false},
      {1001, 0644, TMPFS_MAGIC, false},
  };
  for (const Case& one : cases) {
    const NotPrivate found = whyNotPrivate("/a/secret", {one.owner, one.mode, one.file_system}, kMe);
    EXPECT_EQ(found.why.empty(), one.private_enough) << one.owner << " " << std::oct << one.mode << " " << found.why;
    EXPECT_EQ(found.hint.empty(), one.private_enough);
  }
  const NotPrivate kubernetes = whyNotPrivate("/a/secret", {0, 0644, kDisk}, kMe);
  EXPECT_THAT(kubernetes.why, HasSubstr("has mode 0644"));
  EXPECT_THAT(kubernetes.hint, HasSubstr("defaultMode: 0440"));
  EXPECT_THAT(kubernetes.hint, HasSubstr("fsGroup"));
}

} // namespace
} // namespace pycomm
