#include "engine/operation/flight_log.h"

#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "engine/ranks.h"
#include "engine/report/flight_json.h"
#include "temp_folder.h"

namespace pycomm {
namespace {

using testing::Rank;
using testing::runRanks;

std::shared_ptr<FlightLog> logOf(size_t slots) {
  FlightLog::Subject subject;
  subject.group = "g";
  subject.slots = slots;
  return FlightLog::open(subject);
}

Descriptor allReduceOf(int64_t numel) {
  Descriptor descriptor;
  descriptor.kind = Collective::AllReduce;
  descriptor.dtype = DType::BFloat16;
  descriptor.codec = Codec::Float16;
  descriptor.reduce_op = ReduceOp::Avg;
  descriptor.algorithm = Algorithm::Direct;
  descriptor.root = 3;
  descriptor.tag = 4000000000U;
  descriptor.digest = 4000000001U;
  descriptor.numel = numel;
  return descriptor;
}

FlightLog::Mark issue(const std::shared_ptr<FlightLog>& log, int64_t sequence) {
  return FlightLog::issued(
      log, OperationId{static_cast<uint64_t>(sequence), sequence}, allReduceOf(sequence * 10), Clock::now());
}

std::vector<int64_t> sequencesOf(const FlightLog& log) {
  std::vector<int64_t> out;
  for (const FlightLog::Entry& entry : log.read().entries) {
    out.push_back(entry.id.sequence);
  }
  return out;
}

// Its slot is given away while it ends: to an operation under way, which must not look as if it had ended.
TEST(FlightLog, AnOldOperationDoesNotEndANewerOne) {
  constexpr int kRounds = 20000;
  const auto log = logOf(1);
  FlightLog::Mark old;
  std::atomic<int> turn{0};
  std::thread ends([&] {
    for (int round = 1; round <= kRounds; ++round) {
      while (turn.load() != 2 * round - 1) {
        std::this_thread::yield();
      }
      old.ended(std::nullopt);
      turn = 2 * round;
    }
  });
  int wrong = 0;
  for (int round = 1; round <= kRounds; ++round) {
    old = issue(log, 2 * round);
    turn = 2 * round - 1;
    const FlightLog::Mark newer = issue(log, 2 * round + 1);
    while (turn.load() != 2 * round) {
      std::this_thread::yield();
    }
    wrong += newer.address() != nullptr && log->read().entries.at(0).state != OperationState::Queued ? 1 : 0;
    newer.ended(std::nullopt);
  }
  ends.join();
  EXPECT_EQ(wrong, 0);
}

TEST(FlightLog, KeepsEverythingAboutAnOperation) {
  const auto log = logOf(4);
  const FlightLog::Mark mark = issue(log, 7);
  FlightLog::Entry entry = log->read().entries.at(0);
  EXPECT_EQ(entry.state, OperationState::Queued);
  EXPECT_EQ(entry.descriptor, allReduceOf(70));
  EXPECT_EQ(entry.id.id, 7U);
  EXPECT_EQ(entry.blamed, -1);
  EXPECT_GT(entry.thread, 0);
  EXPECT_EQ(entry.started_ns, 0);

  const TimePoint now = Clock::now();
  mark.running(now, 100);
  mark.arriving(now + std::chrono::milliseconds(1));
  mark.arriving(now + std::chrono::milliseconds(2)); // the first counts
  mark.received(40);
  entry = log->read().entries.at(0);
  EXPECT_EQ(entry.state, OperationState::Running);
  EXPECT_EQ(entry.first_byte_ns - entry.started_ns, 1000000);
  EXPECT_EQ(entry.bytes_done, 40);
  EXPECT_EQ(entry.bytes_total, 100);
  EXPECT_EQ(entry.ended_ns, 0);

  ErrorRecord error;
  error.code = ErrorCode::PeerDead;
  error.peer = 5;
  mark.ended(error);
  entry = log->read().entries.at(0);
  EXPECT_EQ(entry.state, OperationState::Failed);
  EXPECT_EQ(entry.code, ErrorCode::PeerDead);
  EXPECT_EQ(entry.blamed, 5);
  EXPECT_GE(entry.ended_ns, entry.issued_ns);
  EXPECT_TRUE(log->read().complete);
}

TEST(FlightLog, AnOperationUnderWayIsNotForgottenForEndedOnes) {
  const auto log = logOf(4);
  const FlightLog::Mark hangs = issue(log, 1);
  for (int64_t sequence = 2; sequence <= 50; ++sequence) {
    issue(log, sequence).ended(std::nullopt);
  }
  EXPECT_EQ(sequencesOf(*log), (std::vector<int64_t>{1, 48, 49, 50}));
  EXPECT_FALSE(log->read().complete);
  hangs.ended(std::nullopt);
  for (int64_t sequence = 51; sequence <= 54; ++sequence) {
    issue(log, sequence).ended(std::nullopt);
  }
  EXPECT_EQ(sequencesOf(*log), (std::vector<int64_t>{51, 52, 53, 54}));
}

TEST(FlightLog, ALateWriterLeavesANewerOperationAlone) {
  const auto log = logOf(2);
  std::vector<FlightLog::Mark> marks;
  for (int64_t sequence = 1; sequence <= 3; ++sequence) { // all under way: the third takes a slot all the same
    marks.push_back(issue(log, sequence));
  }
  ASSERT_EQ(log->read().entries.size(), 2U);
  marks[0].ended(std::nullopt);
  marks[1].ended(std::nullopt);
  int ended = 0;
  for (const FlightLog::Entry& entry : log->read().entries) {
    ended += entry.state == OperationState::Done ? 1 : 0;
    EXPECT_EQ(entry.id.sequence == 3, entry.state != OperationState::Done);
  }
  EXPECT_EQ(ended, 1);
}

// An operation's place is two cache lines and no more, however malloc aligns what it gives.
TEST(FlightLog, PlacesBeginOnCacheLines) {
  std::vector<std::shared_ptr<FlightLog>> logs;
  for (size_t slots = 1; slots <= 200; ++slots) {
    logs.push_back(logOf(slots));
    const FlightLog::Mark mark = issue(logs.back(), 1);
    ASSERT_NE(mark.address(), nullptr);
    ASSERT_EQ(reinterpret_cast<uintptr_t>(mark.address()) % 64, 0U) << slots;
    for (size_t more = 2; more <= slots; ++more) { // the last one lies in memory of the log's, or a sanitizer says so
      (void)issue(logs.back(), static_cast<int64_t>(more));
    }
    ASSERT_EQ(logs.back()->read().entries.size(), slots);
  }
}

TEST(FlightLog, WithoutSlotsNothingIsKept) {
  const auto log = logOf(0);
  const FlightLog::Mark mark = issue(log, 1);
  mark.running(Clock::now(), 1);
  mark.ended(std::nullopt);
  EXPECT_TRUE(log->read().entries.empty());
  EXPECT_NE(log->read().phase_ns[static_cast<size_t>(GroupPhase::Rendezvous)], 0);
}

// Also for the thread sanitizer. An entry that is read is one operation's: its numel is always ten times its sequence.
TEST(FlightLog, IsReadBesideWriters) {
  const auto log = logOf(16);
  std::atomic<int64_t> next{1};
  std::atomic<bool> stop{false};
  std::vector<std::thread> writers;
  for (int i = 0; i < 3; ++i) {
    writers.emplace_back([&] {
      while (!stop.load()) {
        const FlightLog::Mark mark = issue(log, next.fetch_add(1));
        mark.running(Clock::now(), 8);
        mark.received(8);
        mark.ended(std::nullopt);
      }
    });
  }
  size_t seen = 0;
  while (next.load() < 30000 || seen < 10000) {
    for (const FlightLog::Entry& entry : log->read().entries) {
      ASSERT_EQ(entry.descriptor.numel, entry.id.sequence * 10);
      ASSERT_EQ(entry.descriptor.tag, 4000000000U);
      ++seen;
    }
  }
  stop.store(true);
  for (std::thread& writer : writers) {
    writer.join();
  }
}

TEST(FlightJson, TextIsAlwaysValid) {
  EXPECT_EQ(jsonText("plain"), "\"plain\"");
  EXPECT_EQ(jsonText("a\"b\\c\n\x01"), "\"a\\\"b\\\\c\\u000a\\u0001\"");
  EXPECT_EQ(
      jsonText("gr\xc3\xbc\xc3\x9f \xe2\x82\xac \xf0\x9f\x98\x80"),
      "\"gr\xc3\xbc\xc3\x9f \xe2\x82\xac \xf0\x9f\x98\x80\"");
  // A lone tail, a cut sequence, an overlong form, a surrogate, and what lies beyond the last code point.
  EXPECT_EQ(jsonText("\x80"), "\"\\ufffd\"");
  EXPECT_EQ(jsonText("\xe2\x82"), "\"\\ufffd\\ufffd\"");
  EXPECT_EQ(jsonText("\xc0\xaf"), "\"\\ufffd\\ufffd\"");
  EXPECT_EQ(jsonText("\xed\xa0\x80"), "\"\\ufffd\\ufffd\\ufffd\"");
  EXPECT_EQ(jsonText("\xf4\x90\x80\x80"), "\"\\ufffd\\ufffd\\ufffd\\ufffd\"");
}

std::string contentsOf(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

TEST(FlightRecorder, WritesWholeFilesOrNone) {
  const testing::TempFolder temporary;
  const std::filesystem::path& folder = temporary.path();
  CallbackPool pool;
  FlightRecorder recorder(pool);
  FlightLog::Subject subject;
  subject.group = "g";
  subject.slots = 4;
  subject.rank = 1;
  subject.size = 2;
  subject.job = JobRanks({2, 3});
  subject.dump_prefix = (folder / "deep" / "rank_").string();
  const auto log = recorder.open(subject);
  issue(log, 1).ended(std::nullopt);
  ErrorRecord error;
  error.code = ErrorCode::Aborted;
  recorder.failed(log, error);
  EXPECT_TRUE(pool.stop(Deadline::after(10000)));
  const std::string text = contentsOf(folder / "deep" / "rank_3.json");
  EXPECT_NE(text.find("\"code\":\"ABORTED\""), std::string::npos);
  EXPECT_EQ(text.substr(text.size() - 4), "\n]}\n");
  EXPECT_EQ(text, contentsOf(folder / "deep" / "rank_3.json"));
  size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "deep")) {
    static_cast<void>(entry);
    ++files;
  }
  EXPECT_EQ(files, 1U);
  const auto rights = std::filesystem::status(folder / "deep" / "rank_3.json").permissions();
  EXPECT_EQ(rights, std::filesystem::perms::owner_read | std::filesystem::perms::owner_write) << "it names hosts";
  try {
    recorder.write((folder / "deep" / "rank_3.json" / "x").string());
    FAIL() << "nothing can be written below a file";
  } catch (const Error& thrown) {
    EXPECT_EQ(thrown.record().code, ErrorCode::SystemError);
  }
}

// A program that sees its group fail may ask for the file that is being written for the failure.
TEST(FlightRecorder, WritersOfOneFileTakeTurns) {
  const testing::TempFolder temporary;
  const std::filesystem::path& folder = temporary.path();
  CallbackPool pool;
  FlightRecorder recorder(pool);
  FlightLog::Subject subject;
  subject.group = "g";
  subject.slots = 200;
  const auto log = recorder.open(subject);
  for (int64_t sequence = 1; sequence <= 200; ++sequence) {
    issue(log, sequence).ended(std::nullopt);
  }
  const std::string path = (folder / "rank_0.json").string();
  recorder.write(path);
  std::vector<std::thread> writers;
  for (int i = 0; i < 4; ++i) {
    writers.emplace_back([&] {
      for (int turn = 0; turn < 100; ++turn) {
        EXPECT_NO_THROW(recorder.write(path));
        const std::string text = contentsOf(path);
        EXPECT_TRUE(text.size() > 4 && text.substr(text.size() - 4) == "\n]}\n") << text.size();
      }
    });
  }
  for (std::thread& writer : writers) {
    writer.join();
  }
}

TEST(FlightRecorder, KeepsTheLastClosedGroups) {
  CallbackPool pool;
  FlightRecorder recorder(pool);
  FlightLog::Subject subject;
  for (int i = 0; i < 30; ++i) {
    subject.group = "group" + std::to_string(i) + ".";
    recorder.open(subject)->reached(GroupPhase::Closed);
  }
  const std::string text = recorder.json();
  EXPECT_EQ(text.find("group0."), std::string::npos);
  EXPECT_NE(text.find("group29."), std::string::npos);
  EXPECT_NE(text.find("group22."), std::string::npos);
  EXPECT_EQ(text.find("group10."), std::string::npos);
}

// What waits is what is asked for: it is there however many have ended since.
TEST(FlightRecorder, ReportsWhatWaitsAndWhatEndedLast) {
  CallbackPool pool;
  FlightRecorder recorder(pool);
  FlightLog::Subject subject;
  subject.group = "closed.";
  subject.slots = 200;
  recorder.open(subject)->reached(GroupPhase::Closed);
  subject.group = "open.";
  const auto log = recorder.open(subject);
  for (int64_t sequence = 1; sequence <= 200; ++sequence) {
    const FlightLog::Mark mark = issue(log, sequence);
    if (sequence % 2 == 0) {
      mark.ended(std::nullopt);
    }
  }
  const std::string text = recorder.report();
  EXPECT_EQ(text.find("closed."), std::string::npos);
  const auto has = [&](int sequence) {
    return text.find("\"sequence\":" + std::to_string(sequence) + ",") != std::string::npos;
  };
  EXPECT_TRUE(has(1));
  EXPECT_TRUE(has(127)); // the 64th that waits
  EXPECT_FALSE(has(129));
  EXPECT_TRUE(has(200));
  EXPECT_TRUE(has(186));
  EXPECT_FALSE(has(184));
  EXPECT_NE(text.find("\"complete\":false"), std::string::npos);
}

TEST(FlightRecorder, AGroupRecordsItsOperations) {
  runRanks(3, [](Rank& self) {
    std::vector<float> values(1000, 1.0F);
    for (int i = 0; i < 3; ++i) {
      const auto operation = self.group.start(testing::allReduceCall(values));
      ASSERT_TRUE(self.group.wait(*operation, Deadline::after(20000)));
    }
    const FlightLog::Snapshot log = self.group.flightLog().read();
    ASSERT_EQ(log.entries.size(), 3U);
    for (const FlightLog::Entry& entry : log.entries) {
      EXPECT_EQ(entry.state, OperationState::Done);
      EXPECT_EQ(entry.bytes_done, entry.bytes_total);
      EXPECT_GT(entry.bytes_total, 0);
      EXPECT_LE(entry.issued_ns, entry.started_ns);
      EXPECT_LE(entry.started_ns, entry.first_byte_ns);
      EXPECT_LE(entry.first_byte_ns, entry.ended_ns);
    }
    EXPECT_EQ(log.hosts.size(), 3U);
    EXPECT_NE(log.run, 0U);
    const std::string json = self.engine.recorder().json();
    EXPECT_NE(json.find("\"run\":\"" + std::to_string(log.run) + "\""), std::string::npos);
    EXPECT_EQ(json.find(std::to_string(self.group.identity().nonce)), std::string::npos) << "it lets others in";
  });
}

} // namespace
} // namespace pycomm
