#include "base/error.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <set>
#include <string>

namespace pycomm {
namespace {

ErrorRecord fullRecord() {
  ErrorRecord record;
  record.code = ErrorCode::PeerDead;
  record.summary = "Rank 2 on b is gone.";
  record.hint = "look at its log";
  record.cause = "ECONNRESET (Connection reset by peer)";
  record.rank = 0;
  record.host = "a";
  record.peer = 2;
  record.peer_host = "b";
  record.group = "dp";
  record.group_ranks = "0, 2";
  record.epoch = 3;
  record.op = "all_reduce";
  record.sequence = 12;
  record.dtype = "float32";
  record.numel = 100;
  record.bytes_done = 40;
  record.bytes_total = 400;
  record.phase = ErrorPhase::Transfer;
  record.elapsed_ms = 7;
  return record;
}

TEST(ErrorRecord, TextSaysWhatWhoWhereAndWhatToTry) {
  EXPECT_EQ(
      fullRecord().text(),
      "Rank 2 on b is gone. [code=PEER_DEAD peer=2 peer_host=b rank=0 host=a group=dp group_ranks=\"0, 2\" epoch=3 op=all_reduce "
      "seq=12 dtype=float32 numel=100 bytes=40/400 phase=transfer cause=\"ECONNRESET (Connection reset by peer)\" "
      "elapsed=7ms] Try: look at its log");
}

TEST(ErrorRecord, PairsThatSayNothingAreLeftOutOfTheTextAndStayInTheRecord) {
  ErrorRecord record;
  record.code = ErrorCode::Aborted;
  record.group = "0"; // the default group has no group_ranks
  record.epoch = 0;
  record.sequence = 0;
  record.bytes_done = 0;
  record.bytes_total = 0;
  EXPECT_EQ(record.line(), "code=ABORTED seq=0");
  const ErrorRecord read = ErrorRecord::deserialize(record.serialize(), 1).value();
  EXPECT_EQ(read.group, "0");
  EXPECT_EQ(read.epoch, 0);
  EXPECT_EQ(read.bytes_total, 0);

  record.group_ranks = "0-2"; // a subgroup of all ranks, which may have any name
  record.bytes_total = 1;
  record.epoch = 1;
  EXPECT_EQ(record.line(), "code=ABORTED group=0 group_ranks=0-2 epoch=1 seq=0 bytes=0/1");
}

TEST(ErrorRecord, UnknownFieldsAreLeftOut) {
  ErrorRecord record;
  record.code = ErrorCode::Aborted;
  EXPECT_EQ(record.text(), "ABORTED [code=ABORTED]");
}

TEST(ErrorRecord, ALineStaysOneLine) {
  ErrorRecord record;
  record.cause = "two\nlines and \"quotes\"";
  EXPECT_EQ(record.line(), "code=INTERNAL cause=\"two lines and 'quotes'\"");
}

TEST(ErrorRecord, SurvivesTheWire) {
  const ErrorRecord record = fullRecord();
  ErrorRecord read = ErrorRecord::deserialize(record.serialize(), 3).value();
  EXPECT_EQ(read.group_ranks, ""); // does not travel
  read.group_ranks = record.group_ranks;
  EXPECT_EQ(read.text(), record.text());
}

TEST(ErrorRecord, EveryCutOfItsBytesIsRefusedAndNothingMore) {
  const std::string bytes = fullRecord().serialize();
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_FALSE(ErrorRecord::deserialize(bytes.substr(0, length), 3)) << length;
  }
  EXPECT_FALSE(ErrorRecord::deserialize(bytes + '\0', 3)) << "more than a record";
}

TEST(ErrorRecord, LengthsFromTheWireAreBounded) {
  std::string bytes = fullRecord().serialize();
  bytes[9 * 8] = '\xff'; // the first text's length
  bytes[9 * 8 + 1] = '\xff';
  EXPECT_FALSE(ErrorRecord::deserialize(bytes, 3));
}

// Ranks index vectors, and a code is looked up by its name in Python. The number before each is how many 64-bit numbers it follows.
TEST(ErrorRecord, NumbersFromTheWireAreBounded) {
  const std::string good = fullRecord().serialize();
  const auto with = [&](size_t place, int64_t value) {
    std::string bytes = good;
    std::memcpy(bytes.data() + place * 8, &value, sizeof value);
    return ErrorRecord::deserialize(bytes, 3).has_value();
  };
  const auto known = static_cast<int64_t>(ErrorCode::PeerDead);
  EXPECT_TRUE(with(0, known));
  for (const int64_t code : {int64_t{0}, int64_t{-1}, int64_t{99}, int64_t{UINT16_MAX}, known + 65536, INT64_MIN}) {
    EXPECT_FALSE(with(0, code)) << code;
  }
  for (const size_t place : {size_t{1}, size_t{2}}) { // rank, peer
    for (const int64_t rank : {int64_t{-1}, int64_t{0}, int64_t{2}}) {
      EXPECT_TRUE(with(place, rank)) << place << " " << rank;
    }
    for (const int64_t rank :
         {int64_t{-2}, int64_t{3}, int64_t{1000000}, (int64_t{1} << 32) + 1, INT64_MIN, INT64_MAX}) {
      EXPECT_FALSE(with(place, rank)) << place << " " << rank;
    }
  }
}

TEST(ErrorRecord, WhatAPeerWroteStaysOneLineAndCommandsNoTerminal) {
  ErrorRecord record;
  record.summary = "first\nsecond \x1b[2J";
  record.hint = "a\rb";
  record.host = "caf\xc3\xa9\xff";
  record.peer_host =
      "\xc2\x9b"
      "31m\xe2\x80\xae"
      "evil\xe2\x80\xa8next\xc2\x85"; // CSI, right to left, two ends of a line
  const std::string text = ErrorRecord::deserialize(record.serialize(), 1).value().text();
  EXPECT_EQ(text.find_first_of("\n\r\x1b"), std::string::npos) << text;
  EXPECT_EQ(text.rfind("first second  [2J", 0), 0U) << text;
  EXPECT_NE(text.find("host=caf\xc3\xa9?]"), std::string::npos) << text;
  EXPECT_NE(text.find("peer_host=\" 31m evil next \""), std::string::npos) << text;
}

TEST(ErrorRecord, LongTextsAreCutNotRefused) {
  ErrorRecord record;
  record.summary = std::string(100000, 'x');
  record.host = std::string(100000, 'x');
  const ErrorRecord read = ErrorRecord::deserialize(record.serialize(), 1).value();
  EXPECT_EQ(read.summary.size(), 4096U);
  EXPECT_EQ(read.host.size(), 255U);
  for (std::string* text : {&record.hint, &record.cause, &record.peer_host, &record.group, &record.op, &record.dtype}) {
    *text = record.summary;
  }
  EXPECT_LE(record.serialize().size(), ErrorRecord::kMaxSerializedNbytes);
}

// A phase travels as its text, which is the last of a record's bytes.
TEST(ErrorRecord, APhaseSurvivesTheWireAndAnUnknownTextIsNone) {
  for (const char* text : ErrorPhase::kTexts) {
    ErrorRecord record;
    record.phase = ErrorPhase::find(text).value();
    const std::string bytes = record.serialize();
    EXPECT_EQ(bytes.substr(bytes.size() - std::string(text).size()), text);
    EXPECT_EQ(ErrorRecord::deserialize(bytes, 1).value().phase, record.phase) << text;
  }
  ErrorRecord record;
  record.phase = ErrorPhase::Transfer;
  std::string bytes = record.serialize();
  bytes.back() = '?';
  EXPECT_FALSE(ErrorRecord::deserialize(bytes, 1).value().phase.known());
}

TEST(ErrorPhase, TextsAreDistinct) {
  const std::set<std::string> texts(ErrorPhase::kTexts.begin(), ErrorPhase::kTexts.end());
  EXPECT_EQ(texts.size(), ErrorPhase::kTexts.size());
}

TEST(ErrorCode, NamesAreDistinct) {
  std::set<std::string> names;
  int known = 0;
  for (int code = 0; code < 100; ++code) {
    const std::string name = errorCodeName(static_cast<ErrorCode>(code));
    if (name != "UNKNOWN") {
      ++known;
      names.insert(name);
    }
  }
  EXPECT_EQ(names.size(), static_cast<size_t>(known));
  EXPECT_GE(known, 26);
}

TEST(Errno, HasNameAndText) {
  EXPECT_EQ(errnoText(ECONNREFUSED), "ECONNREFUSED (Connection refused)");
}

} // namespace
} // namespace pycomm
