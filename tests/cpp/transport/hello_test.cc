#include "transport/net/hello.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>

#include "views.h"

namespace pycomm {
namespace {

using ::testing::HasSubstr;
using testing::view;
using State = HelloReading::State;

constexpr const char* kGolden =
    "637906012000000000000000000000000000000000000000edfe0000000000000000000000000700ffffffff0000000000000000000000000000000000000000efcdab8967452301030000000500000000000000010000000000000000000000";

Hello sample() {
  Hello hello;
  hello.nonce = 0x0123456789abcdefU;
  hello.rank = 3;
  hello.size = 5;
  hello.epoch = 7;
  hello.group = 0xfeedU;
  hello.purpose = LinkPurpose::Bulk;
  return hello;
}

TEST(Hello, ReadsWhatItWrote) {
  const std::string bytes = encodeHello(sample());
  ASSERT_EQ(bytes.size(), kHelloNbytes);
  const HelloReading reading = decodeHello(view(bytes));
  ASSERT_EQ(reading.state, State::Complete) << reading.why;
  EXPECT_EQ(reading.hello.nonce, sample().nonce);
  EXPECT_EQ(reading.hello.rank, 3);
  EXPECT_EQ(reading.hello.size, 5);
  EXPECT_EQ(reading.hello.epoch, 7);
  EXPECT_EQ(reading.hello.group, 0xfeedU);
  EXPECT_EQ(reading.hello.purpose, LinkPurpose::Bulk);
}

// Another layout needs another version: ranks with different ones must not take each other's bytes for their own.
TEST(Hello, HasTheseBytesInVersion6) {
  std::string hex;
  for (const char byte : encodeHello(sample())) {
    std::array<char, 3> digits{};
    (void)std::snprintf(digits.data(), digits.size(), "%02x", static_cast<unsigned>(static_cast<unsigned char>(byte)));
    hex += digits.data();
  }
  EXPECT_EQ(FrameHeader::kVersion, 6);
  EXPECT_EQ(hex, kGolden);
}

TEST(Hello, IsIncompleteAtEveryBeginning) {
  const std::string bytes = encodeHello(sample());
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_EQ(decodeHello(view(bytes.substr(0, length))).state, State::Incomplete) << length;
  }
}

TEST(Hello, JudgesAsEarlyAsItCan) {
  EXPECT_EQ(decodeHello(view("G")).state, State::ProtocolViolation);
  std::string bytes = encodeHello(sample());
  bytes[2] = 9;
  const HelloReading reading = decodeHello(view(bytes.substr(0, 3)));
  EXPECT_EQ(reading.state, State::VersionMismatch);
  EXPECT_EQ(
      reading.why,
      "the connecting rank speaks pycomm wire version 9 and the listening rank version " +
          std::to_string(FrameHeader::kVersion));
}

std::string withByte(size_t offset, char value) {
  std::string bytes = encodeHello(sample());
  bytes[offset] = value;
  return bytes;
}

TEST(Hello, RefusesWhatNoPeerSends) {
  constexpr size_t kPayload = sizeof(FrameHeader);
  for (const std::string& bytes :
       {withByte(offsetof(FrameHeader, type), 3),
        withByte(offsetof(FrameHeader, payload_nbytes), 33),
        withByte(offsetof(FrameHeader, payload_nbytes) + 3, 127),
        withByte(kPayload + 8 + 3, '\x80'), // a negative rank
        withByte(kPayload + 8, 5), // rank 5 of 5
        withByte(kPayload + 12, 0), // size 0
        withByte(kPayload + 20, 2)}) { // no such purpose
    const HelloReading reading = decodeHello(view(bytes));
    EXPECT_EQ(reading.state, State::ProtocolViolation);
    EXPECT_FALSE(reading.why.empty());
  }
}

TEST(Hello, SurvivesAnyBytes) {
  std::mt19937 random(1); // NOLINT: the same bytes every time
  for (int i = 0; i < 20000; ++i) {
    std::string bytes = i % 2 == 0 ? encodeHello(sample()) : std::string(random() % (kHelloNbytes + 1), '\0');
    for (int flips = 0; flips < 1 + i % 7 && !bytes.empty(); ++flips) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    const HelloReading reading = decodeHello(view(bytes));
    if (reading.state == State::Complete) {
      EXPECT_GE(reading.hello.rank, 0);
      EXPECT_LT(reading.hello.rank, reading.hello.size);
    } else if (reading.state != State::Incomplete) {
      EXPECT_FALSE(reading.why.empty());
    }
  }
}

FrameHeader headerOf(const std::string& bytes) {
  FrameHeader header;
  std::memcpy(static_cast<void*>(&header), bytes.data(), sizeof header);
  return header;
}

TEST(HelloReply, AcceptsOrSaysWhyNot) {
  const std::string accepted = encodeHelloAccepted(9);
  EXPECT_EQ(accepted.size(), sizeof(FrameHeader));
  EXPECT_EQ(headerOf(accepted).type, FrameType::HelloReply);
  EXPECT_EQ(headerOf(accepted).group, 9U);
  EXPECT_FALSE(decodeHelloReply({}, 1));

  ErrorRecord reason;
  reason.code = ErrorCode::VersionMismatch;
  reason.summary = "too old";
  const std::string refused = encodeHelloRefused(reason);
  ASSERT_EQ(headerOf(refused).payload_nbytes, refused.size() - sizeof(FrameHeader));
  EXPECT_EQ(headerOf(refused).group, 0U) << "a stranger learns nothing about the group";
  const auto read = decodeHelloReply(view(refused.substr(sizeof(FrameHeader))), 1);
  ASSERT_TRUE(read);
  EXPECT_EQ(read->code, ErrorCode::VersionMismatch);
  EXPECT_EQ(read->summary, "too old");
  EXPECT_EQ(decodeHelloReply(view("garbage"), 1)->code, ErrorCode::ProtocolViolation);

  for (const ErrorCode code : {ErrorCode::DataCorrupt, ErrorCode::ConnectionReset, ErrorCode::Ok}) {
    reason.code = code;
    const auto no_reason = decodeHelloReply(view(encodeHelloRefused(reason).substr(sizeof(FrameHeader))), 1);
    EXPECT_EQ(no_reason->code, ErrorCode::ProtocolViolation) << static_cast<int>(code);
  }
}

} // namespace
} // namespace pycomm
