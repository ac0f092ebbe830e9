// The wiring between the planes of a group, on loops that run nothing by themselves.
#include "engine/planes.h"

#include <gtest/gtest.h>
#include <sys/epoll.h>

#include <map>

#include "transport/socket_pairs.h"

namespace pycomm {
namespace {

class StillLoop final : public TaskLoop {
 public:
  void post(Task task) override {
    tasks_.push_back(std::move(task));
  }
  void watch(int fd, uint32_t, Handler& handler) override {
    handlers_[fd] = &handler;
  }
  void unwatch(int fd) noexcept override {
    handlers_.erase(fd);
  }
  void addTicker(Ticker&) override {}
  void removeTicker(Ticker&) noexcept override {}
  void addBusy(int) noexcept override {}

  void readAll() {
    for (const auto& entry : std::map<int, Handler*>(handlers_)) {
      entry.second->onReady(EPOLLIN);
    }
  }
  [[nodiscard]] size_t tasks() const noexcept {
    return tasks_.size();
  }
  void runTasks() {
    for (Task& task : std::exchange(tasks_, {})) {
      task();
    }
  }

 private:
  std::map<int, Handler*> handlers_; ///< by descriptor, alive until unwatch
  std::vector<Task> tasks_;
};

// A lane that is busy for seconds must not fill the memory with what its peers ask meanwhile. They ask again.
TEST(Planes, QuestionsThatTheLaneCannotTakeAreDropped) {
  constexpr size_t kMost = 64 << 10;
  constexpr size_t kBatch = 1 << 10;
  GroupIdentity identity;
  identity.rank = 1;
  identity.size = 2;
  identity.name = "test";
  identity.hash = 7;
  identity.hosts = {"alpha", "beta"};
  Membership::Config membership;
  membership.rank = 1;
  membership.hosts = identity.hosts;
  membership.neighbours = {0};
  StillLoop lane;
  StillLoop control;
  Planes::Events events;
  events.failed = [](const ErrorRecord& cause) { ADD_FAILURE() << cause.text(); };
  Planes planes(identity, lane, control, std::move(events));
  planes.openControl({}, membership);
  testing::SocketPair pair = testing::namelessPair();
  SocketLink& peer = *pair.first;
  planes.control()->adopt(0, std::move(pair.second));

  FrameHeader question;
  question.type = FrameType::Waiting;
  question.group = 7;
  question.op_id = 5;
  Route{0, 1}.writeTo(question);
  const std::vector<FrameHeader> batch(kBatch, question);
  const auto ask = [&] {
    const AbortToken none;
    for (size_t sent = 0; sent < kBatch * sizeof question;) {
      const ConstBufferView rest{
          reinterpret_cast<const std::byte*>(batch.data()) + sent, kBatch * sizeof question - sent};
      sent += peer.tryWrite(&rest, 1).nbytes;
      control.readAll();
    }
  };
  for (size_t asked = 0; asked < 2 * kMost; asked += kBatch) {
    ask();
  }
  EXPECT_EQ(lane.tasks(), kMost);
  lane.runTasks();
  EXPECT_EQ(lane.tasks(), 0U);
  ask();
  EXPECT_EQ(lane.tasks(), kBatch) << "there is room again";
  lane.runTasks();
  static_cast<void>(planes.control()->close());
}

} // namespace
} // namespace pycomm
