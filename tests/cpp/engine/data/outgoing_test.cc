#include "engine/data/outgoing.h"

#include <gtest/gtest.h>
#include <sys/epoll.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "engine/operation/descriptor.h"

namespace pycomm {
namespace {

/// Takes everything, and keeps it.
class OpenLink final : public Link {
 public:
  explicit OpenLink(std::string& written) : written_(written) {}
  [[nodiscard]] int fd() const noexcept override {
    return 1000;
  }
  [[nodiscard]] Progress tryWrite(const ConstBufferView* views, size_t count) override {
    Progress progress;
    for (size_t i = 0; i < count; ++i) {
      written_.append(reinterpret_cast<const char*>(views[i].ptr), views[i].nbytes);
      progress.nbytes += views[i].nbytes;
    }
    return progress;
  }
  [[nodiscard]] Progress tryRead(BufferView) override {
    Progress progress;
    progress.would_block = true;
    return progress;
  }
  void shutdownWrite() noexcept override {}
  [[nodiscard]] std::string describe() const override {
    return "a link that keeps what is written";
  }

 private:
  std::string& written_; ///< outlives the links
};

class IdleLoop final : public Loop {
 public:
  void watch(int, uint32_t, Handler& handler) override {
    handler_ = &handler;
  }
  void unwatch(int) noexcept override {
    handler_ = nullptr;
  }
  void addTicker(Ticker&) override {}
  void removeTicker(Ticker&) noexcept override {}
  void addBusy(int) noexcept override {}
  void ready() {
    if (handler_ != nullptr) {
      handler_->onReady(EPOLLOUT);
    }
  }

 private:
  Handler* handler_ = nullptr; ///< of the one link, alive until unwatch
};

class OutgoingTest : public ::testing::Test, protected PeerLinks::Owner {
 protected:
  OutgoingTest() {
    identity.rank = 0;
    identity.size = 2;
    identity.name = "test";
    identity.hash = 7;
    identity.hosts = {"alpha", "beta"};
    options.connect = [this](int) -> std::unique_ptr<Link> {
      ++connections;
      if (refuses) {
        throw Error(ErrorCode::ConnectionReset, "no");
      }
      return std::make_unique<OpenLink>(written);
    };
    Reporter::Events events;
    events.ask = [this](std::vector<Question> questions) {
      for (const Question& question : questions) {
        asked.push_back(question.to);
      }
    };
    PeerLinks::Owner& self = *this;
    links = std::make_unique<PeerLinks>(identity, options, loop, staging, self);
    reporter = std::make_unique<Reporter>(identity, end, std::move(events));
    outgoing = std::make_unique<Outgoing>(identity.rank, *links, end, *reporter);
  }

  static FrameHeader headerOf(FrameType type) {
    FrameHeader header;
    header.type = type;
    header.op_id = 5;
    header.root = 1;
    return header;
  }
  void flush() {
    while (links->flush()) {
    }
    loop.ready();
  }
  /// Frames that have left over the bulk link.
  [[nodiscard]] size_t left() const {
    return written.size() < kHelloNbytes ? 0 : (written.size() - kHelloNbytes) / sizeof(FrameHeader);
  }

  // PeerLinks::Owner
  Sink onHeader(int, const FrameHeader&) override {
    return {};
  }
  void onFrame(int, const FrameHeader&, Sink) override {}
  void onSent(const std::vector<OutFrame>&) override {}
  void onReadingEnded(int, const Error&) override {}
  void onWritingBroke(int, const Error&) override {}
  void onGoodbyesSaid() override {}
  void onThrown(int, const std::exception_ptr&) noexcept override {
    ADD_FAILURE();
  }
  void run(int, void (*body)(const void* context), const void* context) noexcept override {
    body(context);
  }

  GroupIdentity identity;
  PeerLinks::Options options;
  IdleLoop loop;
  StagingPool staging{loop.stagingMemory()};
  PlaneEnd end{identity};
  std::string written; ///< to rank 1
  bool refuses = false; ///< rank 1
  int connections = 0;
  std::vector<int> asked; ///< ranks, over control links
  std::unique_ptr<PeerLinks> links;
  std::unique_ptr<Reporter> reporter;
  std::unique_ptr<Outgoing> outgoing;
};

TEST_F(OutgoingTest, FramesToThisRankItselfTakeNoLink) {
  for (int64_t step = 1; step <= 3; ++step) {
    OutFrame frame;
    frame.step = step;
    outgoing->push(0, std::move(frame));
  }
  EXPECT_EQ(outgoing->takeOwn().step, 1);
  EXPECT_EQ(outgoing->takeOwn().step, 2);
  EXPECT_TRUE(outgoing->hasOwn());
  outgoing->dropOwn();
  EXPECT_FALSE(outgoing->hasOwn());
  EXPECT_EQ(connections, 0);
}

// A rank that only asks opens no bulk link: of many ranks, each would have one to every other.
TEST_F(OutgoingTest, QuestionsTakeControlLinksUntilThereIsABulkLink) {
  outgoing->ask(1, headerOf(FrameType::Waiting));
  EXPECT_TRUE(asked.empty()) << "several leave together";
  outgoing->sendQuestions();
  outgoing->sendQuestions();
  EXPECT_EQ(asked, std::vector<int>{1}) << "once";
  EXPECT_EQ(connections, 0);
  outgoing->push(1, OutFrame{});
  flush();
  ASSERT_EQ(left(), 1U);
  outgoing->ask(1, headerOf(FrameType::Waiting));
  outgoing->sendQuestions();
  flush();
  EXPECT_EQ(left(), 2U);
  EXPECT_EQ(asked, std::vector<int>{1});
}

TEST_F(OutgoingTest, OnlyAFrameThatNoOperationNeedsMayBeLost) {
  refuses = true;
  EXPECT_NO_THROW(outgoing->send(1, headerOf(FrameType::Waiting), false));
  EXPECT_EQ(connections, 1);
  EXPECT_THROW(outgoing->send(1, headerOf(FrameType::Waiting), true), Error) << "say, a question for credit";
}

TEST_F(OutgoingTest, NothingLeavesOnceThePlaneEnds) {
  outgoing->ask(1, headerOf(FrameType::Waiting));
  ErrorRecord cause;
  cause.code = ErrorCode::PeerDead;
  ASSERT_TRUE(end.fail(cause, Clock::now()));
  outgoing->push(0, OutFrame{});
  outgoing->push(1, OutFrame{});
  outgoing->send(1, headerOf(FrameType::NotEntered), false);
  outgoing->sendQuestions();
  flush();
  EXPECT_FALSE(outgoing->hasOwn());
  EXPECT_EQ(connections, 0);
  EXPECT_TRUE(asked.empty());
}

} // namespace
} // namespace pycomm
