// What NcclComm asks of NCCL and of the device, in which order, and what it does when either refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "allocations.h"
#include "base/error.h"
#include "device/nccl_comm.h"
#include "host_device.h"

namespace pycomm::cuda {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::kCaller;

Stream const kSide = reinterpret_cast<Stream>(0x51);
Stream const kWatched = reinterpret_cast<Stream>(0x3a);

using Journal = std::vector<std::string>;

std::string nameOf(Stream stream) {
  return stream == kSide ? "side" : (stream == kCaller ? "caller" : (stream == kWatched ? "watched" : "another"));
}

/// Writes down what it is asked; streams come to where they are watched when the test says so.
class Recorder final : public testing::HostDevice {
 public:
  explicit Recorder(Journal& journal) : journal_(journal) {}
  void setDevice(int) override {
    ADD_FAILURE() << "the caller's device is its own";
  }
  Stream createStream() override {
    ++streams;
    return kWatched;
  }
  void destroyStream(Stream) noexcept override {
    --streams;
  }
  void whenReached(Stream stream, Reached reached, void* context) override {
    journal_.push_back("notify " + nameOf(stream));
    awaited_.emplace_back(reached, context);
  }
  /// All that is watched for has happened, or never will.
  void reachAll(const char* failure = nullptr) {
    for (const auto& [reached, context] : std::exchange(awaited_, {})) {
      reached(context, failure);
    }
  }
  Event createEvent() override {
    ++events;
    return HostDevice::createEvent();
  }
  void destroyEvent(Event event) noexcept override {
    --events;
    HostDevice::destroyEvent(event);
  }
  void record(Event, Stream stream) override {
    journal_.push_back("record " + nameOf(stream));
  }
  void streamWait(Stream stream, Event) override {
    journal_.push_back("wait " + nameOf(stream));
  }
  bool isCapturing(Stream) override {
    return capturing;
  }
  void reduce(DType, ReduceOp, const ReduceArgs&, Stream stream) override {
    journal_.push_back("reduce " + nameOf(stream));
  }
  void copy(void*, const void*, size_t, Stream stream) override {
    journal_.push_back("copy " + nameOf(stream));
  }

  int events = 0;
  int streams = 0;
  bool capturing = false;

 private:
  Journal& journal_;
  std::vector<std::pair<Reached, void*>> awaited_;
};

class ScriptedNccl final : public NcclApi {
 public:
  explicit ScriptedNccl(Journal& journal) : journal_(journal) {}
  std::string origin() const override {
    return "script";
  }
  NcclResult uniqueId(NcclUniqueId* id) override {
    id->bytes[0] = 'x';
    return note("uniqueId");
  }
  NcclResult init(NcclHandle* comm, int size, const NcclUniqueId& id, int rank) override {
    *comm = this;
    return note("init " + std::to_string(rank) + "/" + std::to_string(size) + " " + id.bytes);
  }
  NcclResult asyncError(NcclHandle, NcclResult* out) override {
    ++asked;
    *out = state;
    return NcclResult::Success;
  }
  NcclResult abort(NcclHandle) override {
    return note("abort");
  }
  NcclResult destroy(NcclHandle) override {
    return note("destroy");
  }
  std::string lastError(NcclHandle) override {
    return "the cable is out";
  }
  NcclResult groupStart() override {
    return note("groupStart");
  }
  NcclResult groupEnd() override {
    return note("groupEnd");
  }
  NcclResult allReduce(const void*, void*, size_t count, int dtype, int op, NcclHandle, Stream stream) override {
    return note(
        "allReduce " + std::to_string(count) + " dtype " + std::to_string(dtype) + " op " + std::to_string(op) + " " +
        nameOf(stream));
  }
  NcclResult reduce(const void*, void*, size_t, int, int, int root, NcclHandle, Stream) override {
    return note("reduce to " + std::to_string(root));
  }
  NcclResult broadcast(const void*, void*, size_t count, int, int root, NcclHandle, Stream) override {
    return note("broadcast " + std::to_string(count) + " from " + std::to_string(root));
  }
  NcclResult allGather(const void*, void*, size_t count, int, NcclHandle, Stream) override {
    return note("allGather " + std::to_string(count));
  }
  NcclResult reduceScatter(const void*, void*, size_t count, int, int, NcclHandle, Stream) override {
    return note("reduceScatter " + std::to_string(count));
  }
  NcclResult send(const void*, size_t count, int, int peer, NcclHandle, Stream) override {
    return note("send " + std::to_string(count) + " to " + std::to_string(peer));
  }
  NcclResult recv(void*, size_t count, int, int peer, NcclHandle, Stream) override {
    return note("recv " + std::to_string(count) + " from " + std::to_string(peer));
  }

  NcclResult state = NcclResult::Success; ///< what asyncError tells
  int asked = 0; ///< how often
  std::string no_memory_in; ///< the call that begins so finds none
  std::string refuses; ///< the call that begins so answers ncclSystemError

 private:
  NcclResult note(const std::string& call) {
    journal_.push_back(call);
    if (!no_memory_in.empty() && call.rfind(no_memory_in, 0) == 0) {
      throw std::bad_alloc();
    }
    return !refuses.empty() && call.rfind(refuses, 0) == 0 ? NcclResult::SystemError : NcclResult::Success;
  }
  Journal& journal_;
};

class NcclOrder : public ::testing::Test {
 protected:
  std::unique_ptr<NcclComm> make(int rank = 0, int size = 2, int timeout_ms = 2000) {
    NcclComm::Config config;
    config.rank = rank;
    config.size = size;
    config.group = "g";
    config.stream = kSide;
    config.deadline = Deadline::after(timeout_ms);
    config.exchange = [this](const NcclUniqueId* own, Deadline) {
      journal.push_back(own != nullptr ? "publish" : "fetch");
      NcclUniqueId id;
      id.bytes[0] = 'y';
      return own != nullptr ? *own : id;
    };
    config.group_failure = [this] { return group_failure; };
    return NcclComm::create(nccl, device, config);
  }
  /// Made, and the journal emptied.
  std::unique_ptr<NcclComm> made(int rank = 0, int size = 2) {
    auto comm = make(rank, size);
    journal.clear();
    return comm;
  }
  void TearDown() override {
    device.reachAll(); // also of communicators that have gone: CUDA does
  }
  static NcclCall allReduce(uint64_t numel = 10) {
    NcclCall call;
    call.numel = numel;
    call.sequence = 7;
    return call;
  }
  template <class Body>
  ErrorRecord failureOf(const Body& body) {
    try {
      body();
    } catch (const Error& error) {
      return error.record();
    }
    ADD_FAILURE() << "nothing was thrown";
    return {};
  }

  Journal journal;
  Recorder device{journal};
  ScriptedNccl nccl{journal};
  std::optional<ErrorRecord> group_failure;
};

TEST_F(NcclOrder, RankZeroPublishesTheIdAndTheOthersFetchIt) {
  make(0)->abort({});
  EXPECT_THAT(journal, ElementsAre("uniqueId", "publish", "init 0/2 x", "abort"));
  journal.clear();
  make(1).reset();
  EXPECT_THAT(journal, ElementsAre("fetch", "init 1/2 y", "destroy"));
  EXPECT_EQ(device.events, 0) << "every event was given back";
  EXPECT_EQ(device.streams, 0);
}

TEST_F(NcclOrder, AnOperationWaitsForTheCallerAndItsEndIsWatchedOnAStreamOfItsOwn) {
  const auto comm = made();
  const auto operation = comm->start({allReduce()}, kCaller, Deadline::never());
  EXPECT_THAT(
      journal,
      ElementsAre(
          "record caller",
          "wait side",
          "groupStart",
          "allReduce 10 dtype 7 op 0 side",
          "groupEnd",
          "record side",
          "wait watched",
          "notify watched"));
  journal.clear();
  comm->poll();
  EXPECT_FALSE(comm->done(*operation));
  EXPECT_TRUE(journal.empty()) << "the device is not asked";
  device.reachAll();
  EXPECT_TRUE(comm->done(*operation));
}

// Part of it may be on the stream, and other ranks wait for the rest.
TEST_F(NcclOrder, WithoutMemoryInTheMiddleOfAStartTheCommunicatorFails) {
  const auto comm = made();
  nccl.no_memory_in = "allReduce";
  const ErrorRecord record =
      failureOf([&] { static_cast<void>(comm->start({allReduce()}, kCaller, Deadline::never())); });
  EXPECT_EQ(record.code, ErrorCode::OutOfMemory);
  EXPECT_EQ(record.rank, 0);
  ASSERT_TRUE(comm->failure());
  EXPECT_EQ(comm->failure()->code, ErrorCode::OutOfMemory);
  EXPECT_EQ(journal.back(), "abort");
}

// An exception there would end the process: CUDA's thread is not pycomm's.
TEST_F(NcclOrder, ANoticeNeedsNoMemory) {
  for (const char* const failure : {static_cast<const char*>(nullptr), "cudaErrorLaunchFailure"}) {
    const auto comm = made();
    const auto operation = comm->start({allReduce()}, kCaller, Deadline::never());
    pycomm::testing::failAllocation(1);
    EXPECT_NO_THROW(device.reachAll(failure));
    pycomm::testing::failAllocation(0);
    EXPECT_EQ(comm->done(*operation), failure == nullptr);
    comm->poll();
    EXPECT_EQ(comm->failure().has_value(), failure != nullptr);
  }
}

// Its kernels would wait for other ranks for good.
TEST_F(NcclOrder, AnAbortNeedsNoMemory) {
  ErrorRecord reason;
  reason.code = ErrorCode::Aborted;
  reason.summary = "a test gave up, for a reason that takes more than a few letters to tell";
  for (const bool at_the_end : {false, true}) {
    auto comm = made();
    static_cast<void>(comm->start({allReduce()}, kCaller, Deadline::never()));
    group_failure = reason;
    pycomm::testing::failAllocation(1);
    if (at_the_end) {
      comm.reset();
    } else {
      EXPECT_NO_THROW(comm->abort(reason));
    }
    EXPECT_TRUE(pycomm::testing::allocationFailed());
    pycomm::testing::failAllocation(0);
    EXPECT_EQ(journal.back(), "abort");
    if (!at_the_end) {
      ASSERT_TRUE(comm->failure());
      EXPECT_EQ(comm->failure()->code, ErrorCode::Aborted);
    }
    group_failure.reset();
  }
}

TEST_F(NcclOrder, ANoticeMayComeWhenTheCommunicatorHasGone) {
  auto comm = made();
  const auto operation = comm->start({allReduce()}, kCaller, Deadline::never());
  comm.reset();
  EXPECT_EQ(journal.back(), "abort") << "with work under way, destroying would wait for other ranks";
  device.reachAll("cudaErrorLaunchFailure");
}

TEST_F(NcclOrder, EventsAreUsedAgain) {
  const auto comm = made();
  for (int i = 0; i < 10; ++i) {
    static_cast<void>(comm->start({allReduce()}, kCaller, Deadline::never()));
  }
  EXPECT_EQ(device.events, 2) << "one for entries, one for ends";
}

TEST_F(NcclOrder, SeveralCallsAreOneGroup) {
  const auto comm = made();
  NcclCall broadcast = allReduce(3);
  broadcast.kind = Collective::Broadcast;
  broadcast.peer = 1;
  NcclCall gather = allReduce(5);
  gather.kind = Collective::AllGather;
  gather.dtype = DType::Float8E4M3;
  NcclCall complex = allReduce(2);
  complex.dtype = DType::Complex128;
  static_cast<void>(comm->start({broadcast, gather, complex}, kCaller, Deadline::never()));
  EXPECT_THAT(
      journal,
      ElementsAre(
          "record caller",
          "wait side",
          "groupStart",
          "broadcast 12 from 1",
          "allGather 5",
          "allReduce 4 dtype 8 op 0 side",
          "groupEnd",
          "record side",
          "wait watched",
          "notify watched"));
}

TEST_F(NcclOrder, TheRingSendsAddsAndSendsRound) {
  const auto comm = made(0, 3);
  NcclCall call = allReduce(6); // two elements a part
  call.algorithm = Algorithm::Ring;
  static_cast<void>(comm->start({call}, kCaller, Deadline::never()));
  const Journal expected = {"record caller", "wait side", //
                            "groupStart",    "send 8 to 1",  "recv 8 from 2", "groupEnd", "reduce side", //
                            "groupStart",    "send 8 to 1",  "recv 8 from 2", "groupEnd", "reduce side", //
                            "groupStart",    "send 8 to 1",  "recv 8 from 2", "groupEnd", //
                            "groupStart",    "send 8 to 1",  "recv 8 from 2", "groupEnd", //
                            "record side",   "wait watched", "notify watched"};
  EXPECT_EQ(journal, expected);
}

TEST_F(NcclOrder, ACallWithoutMeaningTouchesNothing) {
  const auto comm = made();
  NcclCall bits = allReduce();
  bits.op = ReduceOp::Bxor;
  bits.dtype = DType::Int32;
  EXPECT_EQ(
      failureOf([&] { static_cast<void>(comm->start({bits}, kCaller, Deadline::never())); }).code,
      ErrorCode::Unsupported);
  NcclCall nobody = allReduce();
  nobody.kind = Collective::Broadcast;
  nobody.peer = 2;
  EXPECT_EQ(
      failureOf([&] { static_cast<void>(comm->start({allReduce(), nobody}, kCaller, Deadline::never())); }).code,
      ErrorCode::InvalidArgument);
  device.capturing = true;
  const ErrorRecord capture =
      failureOf([&] { static_cast<void>(comm->start({allReduce()}, kCaller, Deadline::never())); });
  EXPECT_EQ(capture.code, ErrorCode::Unsupported);
  EXPECT_THAT(capture.summary, HasSubstr("CUDA graph"));
  EXPECT_TRUE(journal.empty());
  EXPECT_FALSE(comm->failure());
}

TEST_F(NcclOrder, AnAlgorithmWithoutAKernelTouchesNothing) {
  for (const DType dtype : {DType::Bool, DType::UInt32, DType::UInt64, DType::Complex64}) {
    for (const Algorithm algorithm : {Algorithm::Ring, Algorithm::Direct}) {
      const auto comm = made();
      NcclCall call = allReduce();
      call.dtype = dtype;
      call.algorithm = algorithm;
      const ErrorRecord refused =
          failureOf([&] { static_cast<void>(comm->start({call}, kCaller, Deadline::never())); });
      EXPECT_EQ(refused.code, ErrorCode::Unsupported);
      EXPECT_THAT(refused.summary, HasSubstr(dtypeName(dtype)));
      EXPECT_TRUE(journal.empty());
      EXPECT_FALSE(comm->failure());
    }
  }
  const auto comm = made(0, 1025);
  NcclCall call = allReduce();
  call.algorithm = Algorithm::Direct;
  EXPECT_THAT(
      failureOf([&] { static_cast<void>(comm->start({call}, kCaller, Deadline::never())); }).summary,
      HasSubstr("1 to 1024 ranks"));
  EXPECT_FALSE(comm->failure());
}

TEST_F(NcclOrder, WhatStaysOnARankIsCopiedOutsideOfTheGroup) {
  const auto comm = made();
  NcclCall call = allReduce();
  call.kind = Collective::AllToAll;
  const std::vector<uint64_t> counts = {2, 3};
  call.send_counts = call.recv_counts = counts;
  static_cast<void>(comm->start({call}, kCaller, Deadline::never()));
  EXPECT_THAT(
      journal,
      ElementsAre(
          "record caller",
          "wait side",
          "copy side",
          "groupStart",
          "send 12 to 1",
          "recv 12 from 1",
          "groupEnd",
          "record side",
          "wait watched",
          "notify watched"));
}

TEST_F(NcclOrder, AFailedCallAbortsAndStays) {
  const auto comm = made();
  nccl.refuses = "allReduce";
  const ErrorRecord first =
      failureOf([&] { static_cast<void>(comm->start({allReduce()}, kCaller, Deadline::never())); });
  EXPECT_EQ(first.code, ErrorCode::SystemError);
  EXPECT_EQ(first.cause, "ncclSystemError: the cable is out");
  EXPECT_THAT(
      journal,
      ElementsAre("record caller", "wait side", "groupStart", "allReduce 10 dtype 7 op 0 side", "groupEnd", "abort"));
  journal.clear();
  nccl.refuses.clear();
  const ErrorRecord second =
      failureOf([&] { static_cast<void>(comm->start({allReduce()}, kCaller, Deadline::never())); });
  EXPECT_EQ(second.text(), first.text());
  comm->poll();
  EXPECT_TRUE(journal.empty()) << "NCCL is not asked again";
}

TEST_F(NcclOrder, AnErrorOnTheWayIsFoundByPollAndNamesTheOldestOperation) {
  const auto comm = made();
  const auto operation = comm->start({allReduce()}, kCaller, Deadline::never());
  nccl.state = NcclResult::RemoteError;
  comm->poll();
  ASSERT_TRUE(comm->failure());
  EXPECT_EQ(comm->failure()->code, ErrorCode::ConnectionReset);
  EXPECT_EQ(comm->failure()->op, "all_reduce");
  EXPECT_EQ(comm->failure()->sequence, 7);
  EXPECT_EQ(journal.back(), "abort");
  EXPECT_FALSE(comm->done(*operation));
}

TEST_F(NcclOrder, ADeadlineThatPassesOnTheDeviceAborts) {
  const auto comm = made();
  static_cast<void>(comm->start({allReduce()}, kCaller, Deadline::after(0)));
  comm->poll();
  ASSERT_TRUE(comm->failure());
  EXPECT_EQ(comm->failure()->code, ErrorCode::Timeout);
  EXPECT_EQ(comm->failure()->rank, 0);
  EXPECT_EQ(comm->failure()->numel, 10);
  EXPECT_EQ(journal.back(), "abort");
}

TEST_F(NcclOrder, ABrokenDeviceIsAFailureAndNotAnException) {
  const auto comm = made();
  static_cast<void>(comm->start({allReduce()}, kCaller, Deadline::never()));
  device.reachAll("cudaErrorLaunchFailure");
  EXPECT_NO_THROW(comm->poll());
  ASSERT_TRUE(comm->failure());
  EXPECT_EQ(comm->failure()->summary, "CUDA: the device broke under all_reduce.");
  EXPECT_EQ(comm->failure()->cause, "cudaErrorLaunchFailure");
  EXPECT_EQ(comm->failure()->sequence, 7);
}

TEST_F(NcclOrder, TheGroupsFailureIsTheCommunicators) {
  const auto comm = made();
  ErrorRecord dead;
  dead.code = ErrorCode::PeerDead;
  dead.peer = 1;
  group_failure = dead;
  const int asked = nccl.asked;
  comm->poll();
  ASSERT_TRUE(comm->failure());
  EXPECT_EQ(comm->failure()->code, ErrorCode::PeerDead);
  EXPECT_THAT(journal, ElementsAre("abort")) << "before anything else, and nothing of CUDA's";
  EXPECT_EQ(nccl.asked, asked);
}

TEST_F(NcclOrder, WaitingForOtherRanksEndsByTheDeadlineOrTheGroup) {
  nccl.state = NcclResult::InProgress;
  const ErrorRecord late = failureOf([&] { static_cast<void>(make(0, 2, 30)); });
  EXPECT_EQ(late.code, ErrorCode::Timeout);
  EXPECT_STREQ(late.phase.text(), "nccl init");
  EXPECT_EQ(journal.back(), "abort");
  ErrorRecord dead;
  dead.code = ErrorCode::PeerDead;
  group_failure = dead;
  EXPECT_EQ(failureOf([&] { static_cast<void>(make()); }).code, ErrorCode::PeerDead);

  group_failure.reset();
  nccl.state = NcclResult::Success;
  const auto comm = made();
  nccl.state = NcclResult::InProgress;
  const ErrorRecord stuck =
      failureOf([&] { static_cast<void>(comm->start({allReduce()}, kCaller, Deadline::after(20))); });
  EXPECT_EQ(stuck.code, ErrorCode::Timeout);
  EXPECT_EQ(stuck.op, "all_reduce");
}

TEST(NcclLoad, SaysWhereItLooked) {
  try {
    static_cast<void>(loadNccl({"/nonexistent/libnccl.so.2"}));
    GTEST_SKIP() << "there is an NCCL on this machine";
  } catch (const Error& error) {
    EXPECT_EQ(error.record().code, ErrorCode::Unsupported);
    EXPECT_THAT(error.record().summary, HasSubstr("/nonexistent/libnccl.so.2"));
    EXPECT_THAT(error.record().hint, HasSubstr("cuda_mode"));
  }
}

} // namespace
} // namespace pycomm::cuda
