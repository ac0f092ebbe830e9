#pragma once

#include <gtest/gtest.h>
#include <sys/epoll.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "engine/data/data_plane.h"
#include "fuzz/bytes_link.h"
#include "schedule/make_schedule.h"

namespace pycomm::testing {

/// Both directions of a link between the rank and one peer.
struct DataLoopWire {
  std::string written; ///< by the rank
  std::string coming; ///< what it will read
  bool full = false; ///< the peer reads nothing
};

class DataLoopLink final : public Link {
 public:
  DataLoopLink(DataLoopWire& wire, int fd) : wire_(wire), fd_(fd) {}
  [[nodiscard]] int fd() const noexcept override {
    return fd_;
  }
  [[nodiscard]] Progress tryWrite(const ConstBufferView* views, size_t count) override {
    Progress progress;
    progress.would_block = wire_.full;
    for (size_t i = 0; i < count && !wire_.full; ++i) {
      wire_.written.append(reinterpret_cast<const char*>(views[i].ptr), views[i].nbytes);
      progress.nbytes += views[i].nbytes;
    }
    return progress;
  }
  [[nodiscard]] Progress tryRead(BufferView into) override {
    Progress progress;
    progress.nbytes = std::min(into.nbytes, wire_.coming.size());
    progress.would_block = progress.nbytes == 0;
    wire_.coming.copy(reinterpret_cast<char*>(into.ptr), progress.nbytes);
    wire_.coming.erase(0, progress.nbytes);
    return progress;
  }
  void shutdownWrite() noexcept override {}
  [[nodiscard]] std::string describe() const override {
    return "a link of a test";
  }

 private:
  DataLoopWire& wire_; ///< outlives the plane, which owns this
  const int fd_;
};

/// Rank 0 of some; the test is the others, and the clock.
class LoneDataLoop {
 public:
  explicit LoneDataLoop(int size = 3, Limits limits = {}) : identity(identityOf(size)) {
    Clock::simulate(&now_);
    DataPlane::Events events;
    events.noticed = [this](ErrorRecord record) {
      if (loses_news) {
        throw std::bad_alloc();
      }
      noticed.push_back(std::move(record));
    };
    events.doubted = events.noticed;
    events.left = [this](int peer) { left.push_back(peer); };
    events.ask = [this](const std::vector<Question>& questions) {
      asked_.insert(asked_.end(), questions.begin(), questions.end());
    };
    DataPlane::Options options;
    options.limits = std::move(limits);
    options.connect = [this](int peer) -> std::unique_ptr<Link> {
      ++connections;
      if (refuses) {
        throw Error(ErrorCode::ConnectFailed, "no");
      }
      return std::make_unique<DataLoopLink>(out[peer], kOutFd + peer);
    };
    plane = std::make_unique<DataPlane>(identity, loop, std::move(events), std::move(options));
  }
  ~LoneDataLoop() {
    plane->fail(because(ErrorCode::ShutDown));
    plane.reset();
    Clock::simulate(nullptr);
  }
  LoneDataLoop(const LoneDataLoop&) = delete;
  LoneDataLoop& operator=(const LoneDataLoop&) = delete;

  static ErrorRecord because(ErrorCode code) {
    ErrorRecord reason;
    reason.code = code;
    reason.summary = "The end.";
    return reason;
  }

  [[nodiscard]] TimePoint at(int ms) const {
    return start_ + std::chrono::milliseconds(ms);
  }
  void tick(int ms) {
    passTo(ms);
    plane->tick(now_);
  }
  void passTo(int ms) {
    now_ = at(ms);
  }

  /// Of this rank as the root of a broadcast, or of another one in a chain; `id` may be a derived one.
  std::shared_ptr<Operation> broadcast(
      uint64_t id,
      Deadline deadline = Deadline::never(),
      int64_t numel = 10,
      int root = 0) {
    ScheduleRequest wish = wishOf(Collective::Broadcast, numel);
    wish.root = root;
    wish.algorithm = root == 0 ? Algorithm::Auto : Algorithm::Ring;
    Operation::Request request = requestOf(wish, deadline);
    request.id = {id, (id & kDerivedIdBit) != 0 ? -1 : static_cast<int64_t>(id)};
    return std::make_shared<Operation>(std::move(request));
  }
  /// A message between this rank and a peer.
  std::shared_ptr<Operation> message(bool receives, Deadline deadline = Deadline::never(), int peer = 1) {
    ScheduleRequest wish = wishOf(receives ? Collective::Recv : Collective::Send, 10);
    wish.root = peer;
    Operation::Request request = requestOf(wish, deadline);
    request.descriptor.kind = Collective::Send; // as the sender has it
    request.descriptor.algorithm = Algorithm::Direct;
    request.descriptor.root = -1;
    request.receives = receives;
    request.peer = peer;
    return std::make_shared<Operation>(std::move(request));
  }
  /// What a peer sends about an operation.
  static FrameHeader frameOf(const Operation& operation, FrameType type, uint64_t aux = 0) {
    FrameHeader header;
    operation.request().descriptor.writeTo(header);
    header.type = type;
    header.group = 7;
    header.op_id = operation.request().id.id;
    header.aux = aux;
    return header;
  }
  void receive(int peer, const FrameHeader& header) {
    plane->heardQuestion(peer, header);
  }
  /// Ends one that another library ran.
  void followToItsEnd(uint64_t id) {
    plane->follow(broadcast(id));
    plane->followedEnded(id, std::nullopt);
  }

  /// The questions and answers that went to control links since the last call.
  std::vector<Question> takeAsked() {
    return std::exchange(asked_, {});
  }
  /// Whom it asked about which operation, in order.
  std::vector<std::pair<uint64_t, int>> takeQuestions() {
    std::vector<std::pair<uint64_t, int>> questions;
    for (const Question& each : takeAsked()) {
      EXPECT_EQ(each.header.type, FrameType::Waiting);
      questions.emplace_back(each.header.op_id, each.to);
    }
    return questions;
  }
  /// Writes what is queued for a peer. The operations whose data frames have left since the last call, in order.
  std::vector<uint64_t> takeDataFrames(int peer) {
    const std::string& bytes = out[peer].written;
    for (size_t before = bytes.size() + 1; before != bytes.size();) {
      before = bytes.size();
      loop.ready(kOutFd + peer, EPOLLOUT);
    }
    std::vector<uint64_t> ids;
    for (size_t& next = read_[peer]; next + sizeof(FrameHeader) <= bytes.size();) {
      FrameHeader header;
      std::memcpy(static_cast<void*>(&header), bytes.data() + next, sizeof header);
      next += sizeof header + header.payload_nbytes;
      if (header.type == FrameType::Data) {
        ids.push_back(header.op_id);
      }
    }
    return ids;
  }

  const GroupIdentity identity;
  fuzz::HandLoop loop;
  std::map<int, DataLoopWire> out; ///< by peer: the link that the rank has opened
  std::vector<ErrorRecord> noticed;
  bool loses_news = false; ///< there is no memory to report what is noticed
  bool refuses = false; ///< no link to a peer can be opened
  std::vector<int> left;
  int connections = 0; ///< that the rank has opened, or tried to
  std::unique_ptr<DataPlane> plane;

 private:
  static constexpr int kOutFd = 1000;

  static GroupIdentity identityOf(int size) {
    GroupIdentity identity;
    identity.rank = 0;
    identity.size = size;
    identity.name = "test";
    identity.hash = 7;
    for (int rank = 0; rank < size; ++rank) {
      identity.hosts.push_back("host" + std::to_string(rank));
    }
    return identity;
  }
  [[nodiscard]] ScheduleRequest wishOf(Collective kind, int64_t numel) const {
    ScheduleRequest wish;
    wish.kind = kind;
    wish.dtype = DType::Float32;
    wish.rank = 0;
    wish.size = identity.size;
    wish.numel = numel;
    return wish;
  }
  Operation::Request requestOf(const ScheduleRequest& wish, Deadline deadline) {
    Operation::Request request;
    request.schedule = prepare(makeSchedule(wish));
    request.descriptor = Descriptor::of(wish, request.schedule->schedule.algorithm);
    request.deadline = deadline;
    auto& memory = memory_.emplace_back(std::make_unique<float[]>(static_cast<size_t>(wish.numel)));
    request.output = {reinterpret_cast<std::byte*>(memory.get()), static_cast<size_t>(wish.numel) * sizeof(float)};
    request.input = request.output;
    return request;
  }

  const TimePoint start_ = TimePoint(std::chrono::hours(1));
  TimePoint now_ = start_;
  std::vector<Question> asked_;
  std::vector<std::unique_ptr<float[]>> memory_;
  std::map<int, size_t> read_;
};

} // namespace pycomm::testing
