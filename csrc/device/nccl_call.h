#pragma once

#include <cstdint>
#include <vector>

#include "base/dtype.h"
#include "base/reduce_op.h"
#include "schedule/step.h"

namespace pycomm::cuda {

/// One rank's call of NCCL. Sizes are in elements.
struct NcclCall {
  /// AllReduce, Reduce, Broadcast, AllGather, ReduceScatter or AllToAll; NCCL runs no other.
  Collective kind = Collective::AllReduce;
  /// AllReduce: Ring and Direct move with ncclSend and ncclRecv and add with pycomm's reduce kernel, Direct in fp32 and in rank order,
  /// rounded once; Ring rounds a small float once per hop. Every other algorithm is ncclAllReduce.
  Algorithm algorithm = Algorithm::Auto;
  const void* input = nullptr;
  void* output = nullptr;
  uint64_t numel = 0; ///< of the whole tensor; of one rank's part for AllGather and ReduceScatter
  DType dtype = DType::Float32;
  ReduceOp op = ReduceOp::Sum;
  int peer = 0; ///< the root of Reduce and Broadcast
  std::vector<uint64_t> send_counts; ///< AllToAll: per rank
  std::vector<uint64_t> recv_counts;
  const char* name = "all_reduce"; ///< for errors; a literal
  int64_t sequence = -1;
};

} // namespace pycomm::cuda
