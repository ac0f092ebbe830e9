#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <vector>

#include "c10d/work.h"
#include "engine/group.h"
#include "engine/operation/operation.h"

namespace pycomm {

/// The Work of one message whose tensor the engine reads or writes in place. It does the same as PycommWork in a quarter of its size,
/// since a program may hold a million of them.
///
/// Holds the tensor and its memory until the operation has ended, also when the user drops this before. The memory by itself, too, as
/// a tensor gets another one by `x.data = y`.
class MessageWork final : public c10d::Work {
 public:
  /// Before its operation, so that none is under way whose memory has no owner.
  MessageWork(c10::intrusive_ptr<WorkOwner> owner, int rank, c10d::OpType type, at::Tensor tensor)
      : Work(rank, type), owner_(std::move(owner)), tensor_(std::move(tensor)), storage_(tensor_.storage()) {}
  ~MessageWork() override;
  /// Once, before others have this.
  void started(std::shared_ptr<Operation> operation) noexcept {
    operation_ = std::move(operation);
  }

  bool isCompleted() override;
  bool isSuccess() const override {
    return operation_->done() && !operation_->error();
  }
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override {
    return {tensor_};
  }
  void synchronize() override {
    wait(kNoTimeout);
  }
  bool wait(std::chrono::milliseconds timeout) override;
  void blockCurrentStream() override {
    whole()->blockCurrentStream();
  }
  void abort() override {
    whole()->abort();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return whole()->getFuture();
  }
  uint64_t getSequencenumber() const override {
    return operation_->identified() ? operation_->request().id.id : 0;
  }
  int sourceRank() const override {
    return whole()->sourceRank();
  }

 private:
  /// For rare calls. If this Work has been waited for, so has that one.
  PycommWork* whole() const;

  const c10::intrusive_ptr<WorkOwner> owner_;
  at::Tensor tensor_;
  c10::Storage storage_;
  std::shared_ptr<Operation> operation_; ///< null until started()
  mutable c10::intrusive_ptr<PycommWork>
      whole_; ///< made when asked for; guarded by mutex_, as is completed_: wait() has returned
};

} // namespace pycomm
