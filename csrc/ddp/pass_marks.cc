#include "ddp/pass_marks.h"

#include <ATen/core/TensorBody.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

namespace pycomm {
namespace {

using torch::autograd::get_current_graph_task_id;

/// The last backward call on this thread that went through a marked graph of any wrapper, and that wrapper's parameters.
struct LastMarked {
  BackwardCall call;
  std::weak_ptr<const std::unordered_set<const c10::TensorImpl*>> params;
};

thread_local LastMarked last_marked;

} // namespace

PassMarks::PassMarks(const std::vector<at::Tensor>& params) {
  Params mine;
  for (const at::Tensor& param : params) {
    mine.insert(param.unsafeGetTensorImpl());
  }
  params_ = std::make_shared<const Params>(std::move(mine));
}

void PassMarks::forward() {
  if (get_current_graph_task_id() == kNoCall) { // else a checkpoint runs it in the call
    call_.forget();
    local_call_.forget();
    last_marked.call.forget();
  }
}

bool PassMarks::enterLocal() {
  if (local_call_.running()) {
    return false;
  }
  local_call_.follow();
  tellOthers(local_call_);
  return true;
}

void PassMarks::enterReducing(bool begun) {
  call_.follow();
  begun_ = begun;
  tellOthers(call_);
}

bool PassMarks::beganHere() const {
  return began_in_ == get_current_graph_task_id();
}

bool PassMarks::mayBeginUnmarked(const at::Tensor& param) const {
  if (any_graph_) {
    return true;
  }
  if (local_call_.running()) {
    return false;
  }
  const auto theirs = last_marked.params.lock();
  const bool others = theirs != nullptr && theirs != params_ && last_marked.call.running();
  return !others || theirs->count(param.unsafeGetTensorImpl()) == 0;
}

void PassMarks::begin() {
  if (!pending()) {
    call_.forget(); // nothing is known of this call
  }
  begun_ = call_.running();
  any_graph_ = false;
  began_in_ = get_current_graph_task_id();
}

void PassMarks::note(size_t param) {
  const int call = get_current_graph_task_id();
  if (noted_in_ != call) {
    noted_in_ = call;
    noted_.clear();
  }
  noted_.push_back(param);
}

std::vector<size_t> PassMarks::takeNoted() {
  return noted_in_ == get_current_graph_task_id() ? std::exchange(noted_, {}) : std::vector<size_t>{};
}

void PassMarks::tellOthers(const BackwardCall& call) const {
  last_marked = {call, params_};
}

} // namespace pycomm
