// all_reduce of sparse COO tensors, whose ranks have different elements and different numbers of them.
//
// 1. Every rank tells all others its shape and number of elements: a small all_gather, started at once.
// 2. When that has ended, a callback thread gathers all indices and all values, with the counts that are now known.
// 3. Each rank adds them up, in rank order, in its own tensor.
//
// So the caller never waits for step 1, and the ids of step 2's operations are derived from that of step 1: the same on all ranks.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/TensorBody.h>
#include <ATen/ops/_coalesced.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/copy_sparse_to_sparse.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <string>
#include <utility>

#include "base/wait_point.h"
#include "c10d/backend.h"
#include "c10d/raising.h"
#include "c10d/tensor_checks.h"
#include "engine/operation/issue_context.h"
#include "engine/report/failure_text.h"

namespace pycomm {
namespace {

constexpr const char* kOp = "all_reduce";
constexpr size_t kMaxDims = 16;

/// What ranks tell each other. Travels as int64.
struct Shape {
  int64_t sparse_dim = 0;
  int64_t dense_dim = 0;
  int64_t nnz = 0;
  int64_t dtype = 0;
  std::array<int64_t, kMaxDims> sizes{};

  explicit Shape(const at::Tensor& tensor)
      : sparse_dim(tensor.sparse_dim()),
        dense_dim(tensor.dense_dim()),
        nnz(tensor._nnz()),
        dtype(static_cast<int64_t>(tensor.scalar_type())) {
    std::copy(tensor.sizes().begin(), tensor.sizes().end(), sizes.begin());
  }

  [[nodiscard]] bool sameButNnz(const Shape& other) const {
    return sparse_dim == other.sparse_dim && dense_dim == other.dense_dim && dtype == other.dtype &&
        sizes == other.sizes;
  }
  [[nodiscard]] int64_t valueNumel() const {
    return std::accumulate(
        sizes.begin() + sparse_dim, sizes.begin() + sparse_dim + dense_dim, int64_t{1}, std::multiplies<>());
  }
  [[nodiscard]] std::string text() const {
    std::string out = "(";
    for (int64_t i = 0; i < sparse_dim + dense_dim; ++i) {
      out += (i == 0 ? "" : ", ") + std::to_string(sizes[static_cast<size_t>(i)]);
    }
    return out + "), " + std::to_string(sparse_dim) + " of them sparse, " +
        c10::toString(static_cast<c10::ScalarType>(dtype));
  }
};
static_assert(sizeof(Shape) == (4 + kMaxDims) * sizeof(int64_t));

BufferView bytesOf(void* ptr, size_t nbytes) {
  return {static_cast<std::byte*>(ptr), nbytes};
}

/// One call under way, owned by the task that runs it.
struct SparseSum {
  std::shared_ptr<Group> group;
  std::shared_ptr<IssueContext> context; ///< of operations that follow the first
  std::shared_ptr<Operation> first;
  std::shared_ptr<Operation> whole; ///< ends when the sum stands in `tensor`: what the Work waits for
  at::Tensor tensor;
  at::Tensor indices;
  at::Tensor values;
  std::vector<Shape> shapes; ///< by rank
  Group::Call prototype; ///< what all its operations share
  bool average = false;
  bool awaited = false; ///< the others count on operations that this rank has not ended yet

  void run() noexcept {
    std::optional<ErrorRecord> error;
    try {
      sum();
    } catch (const std::exception&) {
      error = ownError();
    }
    end(error);
  }

  /// For the case that nothing runs any more.
  void giveUp() noexcept {
    end(recordInAnyCase(group->identity(), [&] {
      return first->error().value_or(
          Error(ErrorCode::ShutDown, "all_reduce: pycomm has been shut down.", "finish before the program ends")
              .record());
    }));
  }

 private:
  void end(const std::optional<ErrorRecord>& error) noexcept {
    whole->finish(error);
    group->engine().dataLoop().nudge(); // a caller that drives the data loop looks whether it is done
  }

  /// In a catch block. If the failure is this rank's own, the others wait for operations that it never begins, so it ends the group.
  [[nodiscard]] ErrorRecord ownError() const noexcept {
    const GroupIdentity& identity = group->identity();
    const bool others_wait = awaited && !group->hasFailed();
    ErrorRecord record = recordInAnyCase(identity, [&] {
      try {
        throw;
      } catch (const Error& error) {
        if (!others_wait) {
          return error.record(); // of an operation, or found by all ranks alike
        }
      } catch (...) { // not an operation's
      }
      ErrorRecord own = recordOfThrownHere(identity);
      own.op = kOp;
      return others_wait ? errorOf(own, identity) : own;
    });
    if (others_wait) {
      const int peer = std::exchange(record.peer, identity.jobRank());
      group->abort(record);
      record.peer = peer;
    }
    return record;
  }

  void await(const Operation& operation) const {
    beforeWait();
    static_cast<void>(group->wait(operation, Deadline::never())); // every operation has a deadline of its own
    if (const auto error = operation.error()) {
      throw Error(*error);
    }
  }

  [[nodiscard]] std::shared_ptr<Operation> gather(const at::Tensor& mine, const at::Tensor& all, int64_t per_element) {
    Group::Call call = prototype;
    call.schedule.dtype = toDType(mine.scalar_type());
    for (const Shape& shape : shapes) {
      call.schedule.counts.push_back(shape.nnz * per_element);
    }
    call.input = bytesOf(mine.data_ptr(), mine.nbytes());
    call.output = bytesOf(all.data_ptr(), all.nbytes());
    return group->start(call);
  }

  void sum() {
    await(*first);
    const GroupIdentity& identity = group->identity();
    const int rank = identity.rank;
    const Shape& mine = shapes[static_cast<size_t>(rank)];
    for (size_t peer = 0; peer < shapes.size(); ++peer) {
      if (!shapes[peer].sameButNnz(mine)) {
        ErrorRecord record;
        record.code = ErrorCode::CollectiveMismatch;
        record.op = kOp;
        record.rank = identity.jobRank();
        record.peer = identity.job.of(static_cast<int>(peer));
        record.summary = "all_reduce: " + identity.job.text(rank) + " has a sparse tensor of " + mine.text() + "; " +
            identity.job.text(static_cast<int>(peer)) + " one of " + shapes[peer].text() + ".";
        record.hint = "pass sparse tensors of one shape and dtype on all ranks";
        throw Error(record);
      }
    }
    awaited = true;
    const IssueScope scope(context);
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    const int64_t nnz = std::accumulate(
        shapes.begin(), shapes.end(), int64_t{0}, [](int64_t total, const Shape& shape) { return total + shape.nnz; });
    const at::Tensor all_indices = at::empty({nnz * mine.sparse_dim}, indices.options());
    at::Tensor all_values = at::empty({nnz * mine.valueNumel()}, values.options());
    // Both end before either's error is raised: they write memory that this function owns.
    std::array<std::shared_ptr<Operation>, 2> gathers;
    try {
      gathers[0] = gather(indices, all_indices, mine.sparse_dim);
      gathers[1] = gather(values, all_values, mine.valueNumel());
    } catch (const std::exception&) {
      if (gathers[0] != nullptr) {
        static_cast<void>(ownError()); // ends the group, and so this operation
        static_cast<void>(group->wait(*gathers[0], Deadline::never()));
      }
      throw;
    }
    for (const auto& operation : gathers) {
      static_cast<void>(group->wait(*operation, Deadline::never()));
    }
    awaited = false;
    for (const auto& operation : gathers) {
      await(*operation);
    }

    std::vector<at::Tensor> columns; // each rank's indices are a matrix of its own
    int64_t begin = 0;
    for (const Shape& shape : shapes) {
      columns.push_back(all_indices.narrow(0, begin, shape.nnz * shape.sparse_dim).view({shape.sparse_dim, shape.nnz}));
      begin += shape.nnz * shape.sparse_dim;
    }
    std::vector<int64_t> value_sizes{nnz};
    for (int64_t i = 0; i < mine.dense_dim; ++i) {
      value_sizes.push_back(mine.sizes[static_cast<size_t>(mine.sparse_dim + i)]);
    }
    all_values = all_values.view(value_sizes);
    const bool small = c10::isReducedFloatingType(tensor.scalar_type());
    if (small) {
      all_values = all_values.to(c10::ScalarType::Float); // added up in fp32, rounded once
    }
    at::Tensor result = at::_sparse_coo_tensor_unsafe(
                            at::cat(columns, 1), all_values, tensor.sizes(), all_values.options().layout(at::kSparse))
                            .coalesce();
    if (average) {
      result = result / static_cast<double>(shapes.size());
    }
    at::copy_sparse_to_sparse_(tensor, small ? result.to(tensor.scalar_type()) : result);
  }
};

} // namespace

c10::intrusive_ptr<c10d::Work> PycommBackend::sparseAllReduce(at::Tensor& tensor, const c10d::AllreduceOptions& opts) {
  const ReduceOp op = toReduceOp(opts.reduceOp);
  const DType dtype = toDType(tensor.scalar_type());
  const bool unsigned_wide = dtype == DType::UInt16 || dtype == DType::UInt32 || dtype == DType::UInt64;
  const std::string why = op == ReduceOp::Sum || op == ReduceOp::Avg
      ? (unsigned_wide ? "torch adds up no sparse tensors of " + std::string(dtypeName(dtype))
                       : whyUnsupported(op, dtype))
      : std::string(reduceOpName(op)) + " of sparse tensors is undefined: what is absent on a rank has no value";
  if (!why.empty()) {
    throw Error(ErrorCode::Unsupported, std::string(kOp) + ": " + why + ".", "use SUM, or tensor.to_dense()");
  }
  if (!tensor.device().is_cpu() || tensor.dim() > static_cast<int64_t>(kMaxDims)) {
    throw Error(
        ErrorCode::Unsupported,
        std::string(kOp) + ": sparse tensors are added up on the CPU, with up to " + std::to_string(kMaxDims) +
            " dimensions; this one has " + std::to_string(tensor.dim()) + " on " + tensor.device().str() + ".",
        "tensor.cpu(), or tensor.to_dense()");
  }
  Window* const open = window();
  auto task = std::make_shared<SparseSum>();
  {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    task->indices = tensor._indices().contiguous();
    task->values = tensor._values().contiguous();
  }
  task->group = group_;
  task->tensor = tensor;
  task->average = op == ReduceOp::Avg;
  task->shapes.assign(static_cast<size_t>(getSize()), Shape(tensor));
  task->prototype = call(Collective::AllGather, opts);
  task->prototype.waits = false;
  task->prototype.tag = tagFor();

  Group::Call first = task->prototype;
  first.schedule.dtype = DType::Int64;
  first.schedule.numel = static_cast<int64_t>(sizeof(Shape) / sizeof(int64_t));
  first.output = bytesOf(task->shapes.data(), task->shapes.size() * sizeof(Shape));
  first.input = first.output.slice(static_cast<size_t>(getRank()) * sizeof(Shape), sizeof(Shape));
  const std::shared_ptr<Operation> begun = task->first = start(first);
  c10::intrusive_ptr<PycommWork> made;
  try {
    Operation::Request request;
    request.id = begun->request().id;
    request.descriptor.kind = Collective::AllReduce;
    task->whole = std::make_shared<Operation>(std::move(request));
    task->context =
        continuationOf(begun->request().id, group_->identity().hash, static_cast<uint8_t>(Collective::AllReduce));
    PycommWork::Content content;
    content.inputs = {tensor};
    content.outputs = {tensor};
    content.operations = {task->whole};
    made = work({c10d::OpType::ALLREDUCE, "pycomm:sparse_all_reduce"}, std::move(content), open);
    made->started();
    // The task waits for operations, which the pool allows for. It alone has the sum, so the data loop keeps no reference to free tensors by.
    const auto run = std::make_shared<CallbackPool::Placed>([task] { task->run(); });
    begun->onDone([run, sum = task.get(), &pool = group_->engine().callbacks()] {
      if (!pool.submit(*run)) {
        sum->giveUp();
      }
    });
  } catch (...) {
    tellOthers();
    static_cast<void>(group_->wait(*begun, Deadline::never())); // the group has ended; it wrote into the task
    if (task->whole != nullptr) {
      task->giveUp();
    }
    throw;
  }
  return made;
}

} // namespace pycomm
