#include "base/error.h"

#include <gtest/gtest.h>

#include <cerrno>
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
  record.group = "default_pg";
  record.epoch = 0;
  record.op = "all_reduce";
  record.sequence = 12;
  record.dtype = "float32";
  record.numel = 100;
  record.bytes_done = 40;
  record.bytes_total = 400;
  record.phase = "transfer";
  record.elapsed_ms = 7;
  return record;
}

TEST(ErrorRecord, TextSaysWhatWhoWhereAndWhatToTry) {
  EXPECT_EQ(
      fullRecord().text(),
      "Rank 2 on b is gone. [code=PEER_DEAD rank=0 host=a peer=2 peer_host=b group=default_pg epoch=0 op=all_reduce "
      "seq=12 dtype=float32 numel=100 bytes=40/400 phase=transfer cause=\"ECONNRESET (Connection reset by peer)\" "
      "elapsed=7ms] Try: look at its log");
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
  EXPECT_EQ(ErrorRecord::deserialize(record.serialize()).text(), record.text());
}

TEST(ErrorRecord, EveryCutOfItsBytesIsRefusedAndNothingMore) {
  const std::string bytes = fullRecord().serialize();
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_EQ(ErrorRecord::deserialize(bytes.substr(0, length)).code, ErrorCode::ProtocolViolation) << length;
  }
}

TEST(ErrorRecord, LengthsFromTheWireAreBounded) {
  std::string bytes = fullRecord().serialize();
  bytes[9 * 8] = '\xff'; // the first text's length
  bytes[9 * 8 + 1] = '\xff';
  EXPECT_EQ(ErrorRecord::deserialize(bytes).code, ErrorCode::ProtocolViolation);
}

TEST(ErrorRecord, WhatAPeerWroteStaysOneLineAndCommandsNoTerminal) {
  ErrorRecord record;
  record.summary = "first\nsecond \x1b[2J";
  record.hint = "a\rb";
  const std::string text = ErrorRecord::deserialize(record.serialize()).text();
  EXPECT_EQ(text.find_first_of("\n\r\x1b"), std::string::npos) << text;
  EXPECT_EQ(text.rfind("first second  [2J", 0), 0U) << text;
}

TEST(ErrorRecord, LongTextsAreCutNotRefused) {
  ErrorRecord record;
  record.summary = std::string(100000, 'x');
  EXPECT_EQ(ErrorRecord::deserialize(record.serialize()).summary.size(), 4096U);
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
