// pycomm's own all_reduces and all_to_all over ncclSend and ncclRecv: threads as ranks, host memory as devices.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "device/nccl_comm.h"
#include "host_device.h"
#include "host_nccl.h"
#include "numeric/convert.h"
#include "numeric/reduce.h"

namespace pycomm::cuda {
namespace {

using testing::HostDevice;
using testing::HostNccl;
using testing::HostWire;

/// Runs `body(comm, rank)` on one thread per rank. An exception of a rank fails the test.
void onRanks(int size, const std::function<void(NcclComm&, int)>& body) {
  const auto wire = std::make_shared<HostWire>();
  std::vector<std::thread> threads;
  std::vector<std::string> errors(static_cast<size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        HostDevice device;
        HostNccl nccl(wire, rank);
        NcclComm::Config config;
        config.rank = rank;
        config.size = size;
        config.group = "g";
        config.deadline = Deadline::after(20000);
        config.exchange = [](const NcclUniqueId* own, Deadline) {
          NcclUniqueId id;
          std::strcpy(id.bytes, "host");
          EXPECT_TRUE(own == nullptr || std::strcmp(own->bytes, "host") == 0);
          return id;
        };
        {
          const auto comm = NcclComm::create(nccl, device, config);
          body(*comm, rank);
        }
        EXPECT_EQ(nccl.aborts, 0);
        EXPECT_EQ(nccl.destroys, 1);
      } catch (const std::exception& error) {
        errors[static_cast<size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const std::string& error : errors) {
    EXPECT_EQ(error, "");
  }
}

std::vector<float> normal(size_t numel, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> values(numel);
  for (float& value : values) {
    value = std::normal_distribution<float>()(random);
  }
  return values;
}

TEST(NcclNumbers, RingAndDirectFollowFloat64AndGiveAllRanksTheSameBits) {
  for (const Algorithm algorithm : {Algorithm::Ring, Algorithm::Direct}) {
    for (int size = 2; size <= 5; ++size) {
      for (const size_t numel : {size_t{1}, size_t{4}, size_t{1001}}) {
        for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max}) {
          for (const bool in_place : {true, false}) {
            std::vector<std::vector<float>> in;
            std::vector<std::vector<float>> out(static_cast<size_t>(size), std::vector<float>(numel));
            for (int rank = 0; rank < size; ++rank) {
              in.push_back(normal(numel, static_cast<uint32_t>(rank + 1)));
            }
            const auto inputs = in;
            onRanks(size, [&](NcclComm& comm, int rank) {
              const auto r = static_cast<size_t>(rank);
              NcclCall call;
              call.input = in[r].data();
              call.output = in_place ? in[r].data() : out[r].data();
              call.numel = numel;
              call.op = op;
              call.algorithm = algorithm;
              const auto started = comm.start({call}, nullptr, Deadline::after(20000));
              EXPECT_TRUE(comm.done(*started));
            });
            const auto& results = in_place ? in : out;
            for (size_t i = 0; i < numel; ++i) {
              double sum = 0;
              double magnitude = 0;
              double largest = inputs[0][i];
              for (const auto& each : inputs) {
                sum += each[i];
                magnitude += std::abs(each[i]);
                largest = std::max<double>(largest, each[i]);
              }
              const double exact = op == ReduceOp::Max ? largest : (op == ReduceOp::Avg ? sum / size : sum);
              ASSERT_NEAR(results[0][i], exact, magnitude * size * 0x1p-24);
              for (const auto& each : results) {
                ASSERT_EQ(std::memcmp(&each[i], &results[0][i], 4), 0);
              }
            }
          }
        }
      }
    }
  }
}

TEST(NcclNumbers, DirectRoundsHalfOnceAndHasTheCpuPathsBits) {
  constexpr size_t kNumel = 777;
  constexpr int kSize = 5;
  std::vector<std::vector<uint16_t>> in;
  std::vector<const void*> sources;
  for (int rank = 0; rank < kSize; ++rank) {
    const auto values = normal(kNumel, static_cast<uint32_t>(rank + 40));
    in.emplace_back(kNumel);
    convertScalar(DType::Float16, in.back().data(), DType::Float32, values.data(), kNumel);
  }
  const auto inputs = in;
  for (const auto& each : inputs) {
    sources.push_back(each.data());
  }
  std::vector<uint16_t> expected(kNumel);
  reduceMany(DType::Float16, ReduceOp::Avg, expected.data(), sources.data(), kSize, kNumel, kSize);
  onRanks(kSize, [&](NcclComm& comm, int rank) {
    NcclCall call;
    call.input = call.output = in[static_cast<size_t>(rank)].data();
    call.numel = kNumel;
    call.dtype = DType::Float16;
    call.op = ReduceOp::Avg;
    call.algorithm = Algorithm::Direct;
    static_cast<void>(comm.start({call}, nullptr, Deadline::after(20000)));
  });
  for (const auto& each : in) {
    EXPECT_EQ(each, expected);
  }
}

TEST(NcclNumbers, AllToAllMovesUnevenParts) {
  constexpr int kSize = 3;
  // Rank r sends r + p elements of value 10 r + p to rank p: none from 0 to 0.
  std::vector<std::vector<int64_t>> out(kSize);
  onRanks(kSize, [&](NcclComm& comm, int rank) {
    NcclCall call;
    call.kind = Collective::AllToAll;
    call.dtype = DType::Int64;
    call.name = "all_to_all";
    std::vector<int64_t> in;
    std::vector<uint64_t> counts;
    size_t received = 0;
    for (int peer = 0; peer < kSize; ++peer) {
      in.insert(in.end(), static_cast<size_t>(rank + peer), 10 * rank + peer);
      received += static_cast<size_t>(rank + peer);
      counts.push_back(static_cast<uint64_t>(rank + peer));
    }
    call.send_counts = call.recv_counts = counts;
    auto& own = out[static_cast<size_t>(rank)];
    own.resize(received);
    call.input = in.data();
    call.output = own.data();
    static_cast<void>(comm.start({call}, nullptr, Deadline::after(20000)));
  });
  EXPECT_EQ(out[0], (std::vector<int64_t>{10, 20, 20}));
  EXPECT_EQ(out[2], (std::vector<int64_t>{2, 2, 12, 12, 12, 22, 22, 22, 22}));
}

} // namespace
} // namespace pycomm::cuda
