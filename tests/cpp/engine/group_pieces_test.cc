// Operations whose input comes, and whose output goes, in pieces while they run (Group::Call::in_pieces). A "device" beside the
// engine's memory stands for the GPU: what the engine touches before it has come, or what leaves before it is whole, are other numbers.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <future>
#include <limits>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "ranks.h"

namespace pycomm::testing {
namespace {

struct Kind {
  const char* name;
  Collective collective;
  Algorithm algorithm;
  Transport transport;
  Codec codec = Codec::None;
};

std::ostream& operator<<(std::ostream& out, const Kind& kind) {
  return out << kind.name;
}

constexpr size_t kWholeNumel = 2'300'000; // 8.8 MiB, no multiple of anything
constexpr float kNotThere = -1e6F; // in memory that nothing has come to

void runOver(Transport transport, int size, const std::function<void(Rank&)>& body) {
  runRanks(size, body, [&](Group::Config& config) { config.transport = transport; });
}

/// One rank's tensors "on the device", and what stands for them in the engine's memory.
class Tensors {
 public:
  Tensors(const Kind& kind, const Rank& self, bool in_place) : in_place_(in_place) {
    const auto ranks = static_cast<size_t>(self.size);
    const size_t part = kWholeNumel / ranks;
    const size_t inputs = kind.collective == Collective::AllGather ? part
        : kind.collective == Collective::ReduceScatter             ? part * ranks
                                                                   : kWholeNumel;
    const size_t outputs = kind.collective == Collective::ReduceScatter ? part
        : kind.collective == Collective::AllGather                      ? part * ranks
                                                                        : kWholeNumel;
    from.resize(inputs);
    for (size_t i = 0; i < inputs; ++i) { // of very different sizes, so that sums depend on their order
      from[i] = static_cast<float>(i % 1013 + 1) * (i % 7 == 0 ? 1e-4F : 1.0F) + static_cast<float>(self.rank) * 0.37F;
    }
    to.assign(outputs, kNotThere);
    input_.assign(inputs, kNotThere);
    output_.assign(outputs, kNotThere);
    call.schedule.kind = kind.collective;
    call.schedule.algorithm = kind.algorithm;
    call.schedule.codec = kind.codec;
    call.schedule.dtype = DType::Float32;
    call.schedule.numel = static_cast<int64_t>(
        kind.collective == Collective::AllGather || kind.collective == Collective::ReduceScatter ? part : kWholeNumel);
    if (kind.collective == Collective::Broadcast) {
      call.schedule.root = 1;
    } else if (kind.collective == Collective::Reduce) {
      call.schedule.root = 0;
      call.schedule.reduce_op = ReduceOp::Sum;
    } else if (kind.collective != Collective::AllGather) {
      call.schedule.reduce_op = ReduceOp::Avg;
    }
    call.input = viewOf(input_);
    call.output = in_place ? viewOf(input_) : viewOf(output_);
    call.deadline = Deadline::after(60000);
  }

  void copyIn(const PieceFlow::Piece& piece) {
    std::memcpy(
        reinterpret_cast<std::byte*>(input_.data()) + piece.offset,
        reinterpret_cast<const std::byte*>(from.data()) + piece.offset,
        piece.nbytes);
  }
  void copyOut(const PieceFlow::Piece& piece) {
    std::memcpy(reinterpret_cast<std::byte*>(to.data()) + piece.offset, call.output.ptr + piece.offset, piece.nbytes);
  }
  void copyAllIn() {
    input_ = from;
  }
  [[nodiscard]] std::vector<float> result() const {
    return in_place_ ? input_ : output_;
  }

  Group::Call call;
  std::vector<float> from;
  std::vector<float> to;

 private:
  const bool in_place_;
  std::vector<float> input_;
  std::vector<float> output_;
};

void finish(Group& group, const Operation& operation) {
  ASSERT_TRUE(group.wait(operation, Deadline::after(60000)));
  ASSERT_FALSE(operation.error()) << operation.error()->text();
}

class Pieces : public ::testing::TestWithParam<Kind> {};
/// Those whose first output needs little of the input.
class PiecesOfAllReduce : public ::testing::TestWithParam<Kind> {};

TEST_P(Pieces, HaveTheBitsOfTheWhole) {
  runOver(GetParam().transport, 3, [](Rank& self) {
    const Kind kind = GetParam();
    const bool in_place = kind.collective == Collective::AllReduce || kind.collective == Collective::Broadcast;
    Tensors whole(kind, self, in_place);
    whole.copyAllIn();
    finish(self.group, *self.group.start(whole.call));

    Tensors pieces(kind, self, in_place);
    const bool reads = kind.collective != Collective::Broadcast || self.rank == 1;
    if (self.rank == 2) { // its tensor is on the CPU: the others' pieces are nothing to it
      pieces.copyAllIn();
      finish(self.group, *self.group.start(pieces.call));
      EXPECT_EQ(pieces.result(), whole.result());
      return;
    }
    pieces.call.held = true;
    pieces.call.in_pieces = true;
    const auto operation = self.group.start(pieces.call);
    PieceFlow* const flow = operation->request().extras().pieces.get();
    ASSERT_NE(flow, nullptr);
    std::vector<int> left(flow->leaving().size(), 0);
    flow->onLeave([&](size_t piece) {
      pieces.copyOut(flow->leaving()[piece]);
      ++left[piece];
    });
    std::thread device([&] {
      if (!reads) {
        self.group.release(operation);
      }
      for (size_t k = 0; reads && k < flow->arriving().size(); ++k) {
        pieces.copyIn(flow->arriving()[k]);
        self.group.release(operation, k + 1);
        std::this_thread::yield();
      }
    });
    finish(self.group, *operation);
    device.join();
    const bool writes = kind.collective != Collective::Reduce || self.rank == 0;
    if (!writes) {
      return;
    }
    EXPECT_EQ(pieces.result(), whole.result());
    size_t numel = 0;
    for (size_t piece = 0; piece < left.size(); ++piece) {
      EXPECT_LE(left[piece], 1);
      if (left[piece] == 1) {
        const auto first = pieces.to.begin() + static_cast<std::ptrdiff_t>(flow->leaving()[piece].offset / 4);
        const size_t count = flow->leaving()[piece].nbytes / 4;
        const std::vector<float> expected = whole.result();
        EXPECT_TRUE(
            std::equal(
                first,
                first + static_cast<std::ptrdiff_t>(count),
                expected.begin() + static_cast<std::ptrdiff_t>(flow->leaving()[piece].offset / 4)))
            << "piece " << piece << " left before it was whole";
        numel += count;
      }
    }
    if (kind.collective != Collective::Broadcast || self.rank != 1) { // whose output was there before
      EXPECT_EQ(numel, pieces.to.size()) << "all that is written leaves";
    }
  });
}

TEST_P(PiecesOfAllReduce, LeaveWhileOthersHaveNotCome) {
  runOver(GetParam().transport, 2, [](Rank& self) {
    Tensors tensors(GetParam(), self, true);
    tensors.call.held = true;
    tensors.call.in_pieces = true;
    const auto operation = self.group.start(tensors.call);
    PieceFlow* const flow = operation->request().extras().pieces.get();
    ASSERT_NE(flow, nullptr);
    std::promise<void> left;
    bool told = false;
    flow->onLeave([&](size_t) {
      if (!std::exchange(told, true)) {
        left.set_value();
      }
    });
    const size_t some = flow->arriving().size() - 2;
    for (size_t k = 0; k < some; ++k) {
      tensors.copyIn(flow->arriving()[k]);
    }
    self.group.release(operation, some);
    EXPECT_EQ(left.get_future().wait_for(std::chrono::seconds(60)), std::future_status::ready)
        << "the first piece of the output is in the first pieces of the input";
    EXPECT_FALSE(operation->done()) << "the last ones have not come";
    for (size_t k = some; k < flow->arriving().size(); ++k) {
      tensors.copyIn(flow->arriving()[k]);
    }
    self.group.release(operation);
    finish(self.group, *operation);
  });
}

TEST_P(PiecesOfAllReduce, OnesThatNeverComeAreTheirRanksFaultAtTheDeadline) {
  runOver(GetParam().transport, 2, [](Rank& self) {
    Tensors tensors(GetParam(), self, true);
    tensors.call.deadline = Deadline::after(self.rank == 1 ? 1000 : 60000);
    tensors.call.held = true;
    tensors.call.in_pieces = true;
    const auto operation = self.group.start(tensors.call);
    PieceFlow* const flow = operation->request().extras().pieces.get();
    ASSERT_NE(flow, nullptr);
    self.group.release(operation, flow->arriving().size() - (self.rank == 1 ? 1 : 0));
    ASSERT_TRUE(self.group.wait(*operation, Deadline::after(60000)));
    const auto error = operation->error();
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code, ErrorCode::Timeout) << error->text();
    EXPECT_EQ(error->peer, 1) << error->text();
    EXPECT_NE(error->summary.find("has not left its device"), std::string::npos) << error->text();
    self.group.release(operation); // in vain
  });
}

constexpr Kind kRing{"AllReduceRing", Collective::AllReduce, Algorithm::Ring, Transport::Tcp};
constexpr Kind kDirect{"AllReduceDirect", Collective::AllReduce, Algorithm::Direct, Transport::Tcp};
constexpr Kind kInt8{"AllReduceInt8", Collective::AllReduce, Algorithm::Auto, Transport::Tcp, Codec::Int8};
constexpr Kind kShared{"AllReduceShared", Collective::AllReduce, Algorithm::Auto, Transport::SharedMemory};

INSTANTIATE_TEST_SUITE_P(
    Kinds,
    Pieces,
    ::testing::Values(
        kRing,
        kDirect,
        kInt8,
        kShared,
        Kind{"AllReduceDoubling", Collective::AllReduce, Algorithm::RecursiveDoubling, Transport::Tcp},
        Kind{"Broadcast", Collective::Broadcast, Algorithm::Auto, Transport::Tcp},
        Kind{"BroadcastShared", Collective::Broadcast, Algorithm::Auto, Transport::SharedMemory},
        Kind{"AllGather", Collective::AllGather, Algorithm::Auto, Transport::Tcp},
        Kind{"AllGatherShared", Collective::AllGather, Algorithm::Auto, Transport::SharedMemory},
        Kind{"ReduceScatter", Collective::ReduceScatter, Algorithm::Auto, Transport::Tcp},
        Kind{"ReduceScatterShared", Collective::ReduceScatter, Algorithm::Auto, Transport::SharedMemory},
        Kind{"Reduce", Collective::Reduce, Algorithm::Auto, Transport::Tcp}),
    [](const auto& each) { return each.param.name; });
INSTANTIATE_TEST_SUITE_P(
    Kinds,
    PiecesOfAllReduce,
    ::testing::Values(kRing, kDirect, kInt8, kShared),
    [](const auto& each) { return each.param.name; });

TEST(PieceFlow, ASmallOperationIsNotCut) {
  runOver(Transport::Tcp, 2, [](Rank& self) {
    std::vector<float> values(100'000, 1);
    Group::Call call = allReduceCall(values);
    call.held = true;
    call.in_pieces = true;
    const auto operation = self.group.start(call);
    EXPECT_EQ(operation->request().extras().pieces, nullptr);
    self.group.release(operation);
    finish(self.group, *operation);
    EXPECT_EQ(values, std::vector<float>(values.size(), 2));
  });
}

TEST(PieceFlow, PiecesOfHugeTensorsAreCountedIn64Bits) {
  PieceFlow::Rounds rounds;
  rounds.part_nbytes = (size_t{6} << 30) + 12;
  rounds.round_nbytes = 1 << 20;
  rounds.output_parts = 3;
  const auto flow = PieceFlow::ofRounds(rounds);
  ASSERT_NE(flow, nullptr);
  const auto cover = [](const std::vector<PieceFlow::Piece>& pieces) {
    return std::accumulate(
        pieces.begin(), pieces.end(), size_t{0}, [](size_t sum, const auto& each) { return sum + each.nbytes; });
  };
  EXPECT_EQ(cover(flow->arriving()), rounds.part_nbytes);
  EXPECT_EQ(cover(flow->leaving()), 3 * rounds.part_nbytes);
  EXPECT_EQ(flow->leaving().back().offset + flow->leaving().back().nbytes, 3 * rounds.part_nbytes);
  std::vector<size_t> left;
  flow->onLeave([&](size_t piece) { left.push_back(piece); });
  size_t needed = 0;
  for (uint64_t round = 0; round <= 6 * 1024; ++round) {
    EXPECT_GE(flow->neededInRound(round), needed);
    needed = flow->neededInRound(round);
    const auto& last = flow->arriving()[needed - 1];
    EXPECT_GE(last.offset + last.nbytes, std::min(rounds.part_nbytes, (round + 1) * rounds.round_nbytes));
    flow->roundEnded(round);
  }
  EXPECT_EQ(needed, flow->arriving().size());
  EXPECT_EQ(left.size(), flow->leaving().size());
}

} // namespace
} // namespace pycomm::testing
