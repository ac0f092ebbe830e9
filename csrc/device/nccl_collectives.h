#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "device/nccl_rank.h"

namespace pycomm::cuda {

/// What each collective is in NCCL's calls, and the two all_reduces of pycomm's own (see NcclCall::algorithm).
///
/// One thread at a time; the destructor and enqueue() have the device as the current one.
class NcclCollectives {
 public:
  /// Runs `body` with the communicator, as one NCCL group. When it returns, NCCL has put the group's kernels onto the stream. Throws
  /// Error.
  using InGroup = std::function<void(const std::function<void(NcclHandle comm)>& body)>;

  explicit NcclCollectives(NcclRank rank);
  ~NcclCollectives();
  NcclCollectives(const NcclCollectives&) = delete;
  NcclCollectives& operator=(const NcclCollectives&) = delete;

  /// Throws Error for a call that neither NCCL nor pycomm's kernel can run.
  void validate(const NcclCall& call) const;
  /// Puts valid calls onto the stream. Throws Error; then some of them may be there.
  void enqueue(const std::vector<NcclCall>& calls, const InGroup& in_group);

 private:
  void copyOwnPart(const NcclCall& call) const;
  void move(const NcclCall& call, NcclHandle comm) const;
  void allToAll(const NcclCall& call, NcclHandle comm) const;
  void send(const void* from, size_t nbytes, int peer, NcclHandle comm) const;
  void recv(void* into, size_t nbytes, int peer, NcclHandle comm) const;
  void ring(const NcclCall& call, const InGroup& in_group);
  void direct(const NcclCall& call, const InGroup& in_group);
  [[nodiscard]] void* scratch(size_t nbytes);

  const NcclRank rank_;
  void* scratch_ = nullptr; ///< grows
  size_t scratch_nbytes_ = 0;
};

} // namespace pycomm::cuda
