#include "transport/rendezvous/rank_record.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "transport/error_matchers.h"
#include "transport/frame_header.h"

namespace pycomm {
namespace {

using testing::errorOf;
using ::testing::HasSubstr;

RankRecord sample(int rank) {
  RankRecord record;
  record.version = FrameHeader::kVersion;
  record.rank = record.job_rank = rank;
  record.size = 4;
  record.host = "alpha";
  record.identity = HostIdentity::ofThisProcess();
  record.process = ProcessIdentity::ofThisProcess();
  record.route = SocketAddress::parse("10.0.0.1", 0);
  record.config_digest = 99;
  record.config_text = "wire_dtype=fp16 lanes=1";
  record.nonce = UINT64_MAX;
  return record;
}

TEST(RankRecord, ReadsWhatItWrote) {
  const RankRecord written = sample(3);
  const RankRecord read = RankRecord::fromWireText(written.wireText(), 3);
  EXPECT_EQ(read.wireText(), written.wireText());
  EXPECT_EQ(read.nonce, UINT64_MAX);
  EXPECT_EQ(read.identity, written.identity);
  EXPECT_EQ(read.route, written.route);
  EXPECT_THAT(read.who(), HasSubstr("rank 3 (host alpha, pid "));
}

TEST(RankRecord, KeepsToItsLinesAndBounds) {
  RankRecord record = sample(0);
  record.host = "al\npha\nsize=9";
  record.config_text = std::string(100000, 'x') + "\nsize=9";
  const std::string text = record.wireText();
  EXPECT_LE(text.size(), kMaxRecordNbytes);
  EXPECT_EQ(RankRecord::fromWireText(text, 0).size, 4);
}

TEST(RankRecord, RefusesWhatNoPycommWrote) {
  const std::string good = sample(1).wireText();
  const auto without = [&](const std::string& key) {
    const size_t begin = good.find("\n" + key + "=");
    return good.substr(0, begin) + good.substr(good.find('\n', begin + 1));
  };
  for (const std::string& text :
       {std::string(),
        std::string("hello"),
        std::string("pycomm x\n"),
        "pycomm " + std::to_string(FrameHeader::kVersion) + "\n",
        std::string(100000, 'p'),
        without("rank"),
        without("size"),
        without("identity"),
        without("process"),
        without("route"),
        without("digest"),
        without("nonce")}) {
    EXPECT_EQ(errorOf([&] { (void)RankRecord::fromWireText(text, 1); }).code, ErrorCode::ProtocolViolation) << text;
  }
  EXPECT_EQ(errorOf([&] { (void)RankRecord::fromWireText(good, 2); }).code, ErrorCode::ProtocolViolation);
}

TEST(RankRecord, SurvivesAnyBytes) {
  std::mt19937 random(2); // NOLINT: the same bytes every time
  const std::string good = sample(1).wireText();
  for (int i = 0; i < 5000; ++i) {
    std::string text = good.substr(0, random() % (good.size() + 1));
    for (int flips = 0; flips < i % 5 && !text.empty(); ++flips) {
      text[random() % text.size()] = static_cast<char>(random());
    }
    try {
      (void)RankRecord::fromWireText(text, 1);
    } catch (const Error& error) {
      EXPECT_EQ(error.record().code, ErrorCode::ProtocolViolation);
    }
  }
}

TEST(CheckCompatible, PrintsBothValues) {
  const RankRecord mine = sample(0);
  checkCompatible(mine, sample(1));

  RankRecord other = sample(1);
  other.size = 5;
  ErrorRecord record = errorOf([&] { checkCompatible(mine, other); });
  EXPECT_EQ(record.code, ErrorCode::ConfigMismatch);
  EXPECT_EQ(record.peer, 1);
  EXPECT_THAT(record.summary, HasSubstr("world size 4"));
  EXPECT_THAT(record.summary, HasSubstr("with 5"));

  other = sample(1);
  other.config_digest = 100;
  other.config_text = "wire_dtype=fp32 lanes=1";
  record = errorOf([&] { checkCompatible(mine, other); });
  EXPECT_EQ(record.code, ErrorCode::ConfigMismatch);
  EXPECT_THAT(record.summary, HasSubstr("wire_dtype=fp16 and"));
  EXPECT_THAT(record.summary, HasSubstr("wire_dtype=fp32"));
  EXPECT_THAT(record.summary, ::testing::Not(HasSubstr("lanes")));

  other = sample(1);
  other.config_digest = 100;
  EXPECT_THAT(errorOf([&] { checkCompatible(mine, other); }).summary, HasSubstr("digest 100"));

  // Another version may have other fields; only its header and host are understood.
  for (const int version : {1, FrameHeader::kVersion + 1}) {
    const std::string text = "pycomm " + std::to_string(version) + "\nhost=beta\nranks=0-7\n";
    const RankRecord another = RankRecord::fromWireText(text, 1);
    record = errorOf([&] { checkCompatible(mine, another); });
    EXPECT_EQ(record.code, ErrorCode::VersionMismatch);
    EXPECT_THAT(
        record.summary, HasSubstr(" speaks pycomm wire version " + std::to_string(FrameHeader::kVersion) + " and "));
    EXPECT_THAT(record.summary, HasSubstr("rank 1 (host beta) version " + std::to_string(version)));
  }
}

TEST(JoinTexts, IsReversible) {
  for (const std::vector<std::string>& texts : std::vector<std::vector<std::string>>{
           {}, {""}, {"a"}, {"", "5:x,", std::string("\0\n", 2)}, {std::string(kMaxRecordNbytes, 'y'), "z"}}) {
    const auto read = splitTexts(joinTexts(texts));
    ASSERT_TRUE(read);
    EXPECT_EQ(*read, texts);
  }
  for (const char* text :
       {"1", "1:", "1:a", "1:ab", "2:a,", ":a,", "x:a,", "-1:a,", "99999999999:a,", "8193:a,", "1:a,1"}) {
    EXPECT_FALSE(splitTexts(text)) << text;
  }
}

} // namespace
} // namespace pycomm
