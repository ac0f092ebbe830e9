#include "ddp/graph_hooks.h"

#include <ATen/core/TensorBody.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <utility>

namespace pycomm {
namespace {

using torch::autograd::get_current_graph_task_id;
using torch::autograd::Node;
using torch::autograd::variable_list;

/// A gradient with a graph of its own (create_graph=True) comes from a marked output. A loss of derivatives is linear in it, so that a backward
/// pass goes through here, and need not through the output. Not within vmap or torch.func, where a tensor has no graph of its own.
class DerivedEntry final : public Node {
 public:
  DerivedEntry(std::function<void()> on_entry, torch::autograd::edge_list&& next)
      : Node(/*sequence_nr=*/UINT64_MAX, std::move(next)), on_entry_(std::move(on_entry)) {} // as early as it can

  static at::Tensor lead(const at::Tensor& grad, const std::function<void()>& on_entry) {
    constexpr c10::DispatchKeySet kTransformed(
        {c10::DispatchKey::Batched, c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper});
    if (!grad.defined() || grad.key_set().has_any(kTransformed)) {
      return grad;
    }
    torch::autograd::edge_list next(1);
    if (grad.requires_grad()) {
      next[0] = torch::autograd::impl::gradient_edge(grad);
    }
    at::Tensor derived = grad.detach();
    torch::autograd::set_history(derived, makeNode<DerivedEntry>(on_entry, std::move(next)));
    return derived;
  }

  variable_list apply(variable_list&& grads) override {
    on_entry_();
    return std::move(grads);
  }

 private:
  std::function<void()> on_entry_;
};

/// The nodes that markGraph() has marked and that live. A call knows its nodes by address alone: after an exception its caller may free them while
/// a device's thread is still in a hook of it.
struct MarkedNodes {
  std::mutex mutex; ///< guards `all`
  std::list<std::pair<Node*, std::shared_ptr<const ForwardMark>>> all;
};

MarkedNodes& markedNodes() {
  static auto* const nodes = new MarkedNodes(); // never destroyed: graphs may outlive static destructors
  return *nodes;
}

class EntryHook final : public torch::autograd::FunctionPreHook {
 public:
  EntryHook(Node* node, const std::shared_ptr<const ForwardMark>& mark, std::function<void()> on_entry)
      : on_entry_(std::move(on_entry)) {
    const std::lock_guard lock(markedNodes().mutex);
    place_ = markedNodes().all.emplace(markedNodes().all.end(), node, mark);
  }
  EntryHook(const EntryHook&) = delete;
  EntryHook& operator=(const EntryHook&) = delete;
  ~EntryHook() override {
    const std::lock_guard lock(markedNodes().mutex);
    markedNodes().all.erase(place_);
  }

  variable_list operator()(const variable_list& grads) override {
    on_entry_();
    if (!at::GradMode::is_enabled()) {
      return grads;
    }
    variable_list derived;
    for (const at::Tensor& grad : grads) {
      derived.push_back(DerivedEntry::lead(grad, on_entry_));
    }
    return derived;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {
    raiseCompiledAutograd();
  }

 private:
  std::function<void()> on_entry_;
  decltype(MarkedNodes::all)::iterator place_;
};

class ComingHook final : public torch::autograd::FunctionPreHook {
 public:
  ComingHook(GradHooks::OnComing on_coming, size_t index) : on_coming_(std::move(on_coming)), index_(index) {}

  variable_list operator()(const variable_list& grads) override {
    if (grads.at(0).defined()) {
      on_coming_(index_, grads[0]);
    }
    return grads;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {
    raiseCompiledAutograd();
  }

 private:
  GradHooks::OnComing on_coming_;
  size_t index_;
};

/// A backward call on this thread that a wrapper takes part in: through a marked graph, or because it has begun its pass there without one.
struct MarkedCall {
  BackwardCall call;
  CallKind kind;
  std::weak_ptr<const MarkedWrapper> wrapper;
};

thread_local std::vector<MarkedCall> marked_calls; ///< the last one of each wrapper

std::mutex wrappers_mutex; ///< guards the next two, and what a MarkedWrapper says of its forward passes
std::vector<std::weak_ptr<const MarkedWrapper>> wrappers; ///< those that have had a forward pass
uint64_t wrapper_events = 0; ///< in which a wrapper was made, or asked for a pass

bool has(const MarkedWrapper& wrapper, const at::Tensor& param) {
  return wrapper.params.count(param.unsafeGetTensorImpl()) > 0;
}

} // namespace

// --- parameters ----------------------------------------------------------------------------------

GradHooks::GradHooks(
    const std::vector<ReducedParam>& params,
    const std::vector<bool>& hooked,
    const OnGradient& on_gradient,
    const OnComing& on_coming) {
  hooked_.reserve(params.size());
  try {
    for (size_t index = 0; index < params.size(); ++index) {
      if (hooked[index]) {
        addHook(params[index].tensor, index, on_gradient, on_coming);
      }
    }
  } catch (...) {
    remove(); // a graph may keep the accumulators alive, and with them hooks whose owner is gone
    throw;
  }
}

void GradHooks::addHook(
    const at::Tensor& param,
    size_t index,
    const OnGradient& on_gradient,
    const OnComing& on_coming) {
  NodePtr accumulator = torch::autograd::impl::grad_accumulator(param);
  TORCH_CHECK(accumulator, "parameter ", index, " is not a leaf that requires a gradient");
  auto hook = std::make_unique<torch::autograd::utils::LambdaPostHook>(
      [on_gradient, index](const variable_list& outputs, const variable_list& inputs) {
        on_gradient(index, inputs.at(0).defined());
        return outputs;
      },
      [](torch::autograd::CompiledNodeArgs& /*args*/) {
        // Compiled autograd records a node's hooks through this function and never calls the C++ ones: without an
        // error here gradients would silently stay local.
        raiseCompiledAutograd();
      });
  const uintptr_t key = accumulator->add_post_hook(std::move(hook));
  hooked_.push_back(
      {index,
       param,
       std::move(accumulator),
       key,
       nullptr}); // there is room: it cannot throw, which would leave the hook
  if (on_coming) {
    auto coming = std::make_unique<ComingHook>(on_coming, index);
    hooked_.back().coming = coming.get();
    hooked_.back().accumulator->add_pre_hook(std::move(coming));
  }
}

GradHooks::~GradHooks() {
  remove();
}

void GradHooks::remove() {
  for (const Hooked& hooked : hooked_) {
    hooked.accumulator->del_post_hook(hooked.key);
    std::erase_if(hooked.accumulator->pre_hooks(), [&](const auto& each) { return each.get() == hooked.coming; });
  }
  hooked_.clear();
}

bool GradHooks::reach() const {
  return std::all_of(hooked_.begin(), hooked_.end(), [](const Hooked& hooked) {
    const auto* const meta = torch::autograd::impl::get_autograd_meta(hooked.param);
    return meta != nullptr && refersTo(meta->grad_accumulator_, hooked.accumulator);
  });
}

std::vector<size_t> GradHooks::unreachableFrom(const std::vector<at::Tensor>& outputs) const {
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> open;
  const auto visit = [&](const Node* node) {
    if (node != nullptr && seen.insert(node).second) {
      open.push_back(node);
    }
  };
  for (const at::Tensor& output : outputs) {
    // An output may be a parameter itself: then its edge leads to the accumulator at once.
    visit(torch::autograd::impl::gradient_edge(output).function.get());
  }
  while (!open.empty()) {
    const Node* node = open.back();
    open.pop_back();
    for (const auto& edge : node->next_edges()) {
      visit(edge.function.get());
    }
  }
  std::vector<size_t> unreached;
  for (const Hooked& hooked : hooked_) {
    if (seen.find(hooked.accumulator.get()) == seen.end()) {
      unreached.push_back(hooked.index);
    }
  }
  return unreached;
}

// --- forward passes ------------------------------------------------------------------------------

void BackwardCall::follow() {
  auto over = std::make_shared<std::atomic<bool>>(false);
  auto within = std::make_shared<std::atomic<bool>>(false);
  over_ = over;
  within_ = within;
  number_ = get_current_graph_task_id();
  torch::autograd::Engine::get_default_engine().queue_callback([over, within] {
    // No node of this call runs any more, so it is one of a call around it, which has made this one.
    within->store(torch::autograd::get_current_node() != nullptr, std::memory_order_release);
    over->store(true, std::memory_order_release);
  });
}

bool BackwardCall::present() const noexcept {
  return running() || (number_ != kNone && number_ == get_current_graph_task_id());
}

bool markGraph(
    const std::vector<at::Tensor>& outputs,
    const std::shared_ptr<const ForwardMark>& mark_of,
    const std::function<void()>& on_entry) {
  std::unordered_set<const Node*> marked;
  const auto mark = [&](const at::TensorBase& output) {
    const auto& node = output.grad_fn();
    if (node != nullptr && marked.insert(node.get()).second) {
      node->add_pre_hook(std::make_unique<EntryHook>(node.get(), mark_of, on_entry));
    }
  };
  for (const at::Tensor& output : outputs) {
    mark(output);
    if (output.is_view()) {
      mark(output._base());
    }
  }
  return !marked.empty();
}

std::vector<std::shared_ptr<const ForwardMark>> marksOfCall() {
  std::vector<std::shared_ptr<const ForwardMark>> marks;
  const auto* const nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr) {
    return marks;
  }
  const std::lock_guard lock(markedNodes().mutex);
  for (const auto& [node, mark] : markedNodes().all) {
    if (nodes->count(node) > 0) {
      marks.push_back(mark);
    }
  }
  return marks;
}

bool callReaches(const std::vector<ReducedParam>& params) {
  const auto* const nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  return nodes != nullptr && std::any_of(params.begin(), params.end(), [nodes](const ReducedParam& param) {
           return nodes->count(torch::autograd::impl::try_get_grad_accumulator(param.tensor).get()) > 0;
         });
}

void raiseCompiledAutograd() {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      "compiled autograd does not call the reduction hooks of pycomm.DistributedDataParallel. Turn compiled "
      "autograd off, or set torch._dynamo.config.optimize_ddp = \"python_reducer\" before wrapping the model, without "
      "wire_dtype, error_feedback, accumulate and sync_every.");
}

bool GradientCall::isOfPresent() const {
  const int present = get_current_graph_task_id();
  return may_begin || number == present || (number > present && !in_another);
}

// --- calls ---------------------------------------------------------------------------------------

PassMarks::PassMarks(const std::vector<at::Tensor>& params) : wrapper_(std::make_shared<MarkedWrapper>()) {
  for (const at::Tensor& param : params) {
    wrapper_->params.insert(param.unsafeGetTensorImpl());
  }
  const std::lock_guard lock(wrappers_mutex);
  wrapper_->made = ++wrapper_events;
}

bool PassMarks::forward() {
  if (!std::exchange(listed_, true)) {
    const std::lock_guard lock(wrappers_mutex);
    std::erase_if(wrappers, [](const auto& each) { return each.expired(); });
    wrappers.push_back(wrapper_);
  }
  if (get_current_graph_task_id() != BackwardCall::kNone) {
    return false;
  }
  outermost_.forget();
  call_.forget();
  local_call_.forget();
  marked_calls.clear();
  return true;
}

bool PassMarks::follow() {
  if (outermost_.running()) {
    return false;
  }
  const bool goes_on = outermost_.endedWithin();
  const bool began_nested = goes_on && get_current_graph_task_id() < outermost_.number() && began_.sameAs(outermost_);
  outermost_.follow();
  if (began_nested) {
    began_ = outermost_;
  }
  if (!goes_on) {
    noted_.clear();
  }
  return !goes_on;
}

int PassMarks::call() const {
  return outermost_.running() ? outermost_.number() : get_current_graph_task_id();
}

bool PassMarks::leftNested() const {
  return get_current_graph_task_id() == BackwardCall::kNone && endedWithin() &&
      std::any_of(noted_.begin(), noted_.end(), [](const Noted& each) { return each.call.may_begin; });
}

bool PassMarks::enterLocal() {
  if (local_call_.running()) {
    return false;
  }
  local_call_.follow();
  tellOthers();
  return true;
}

void PassMarks::enterReducing(bool begun) {
  call_.follow();
  begun_ = begun;
  tellOthers();
}

bool PassMarks::repeatsForward() const {
  return reduces() && get_current_graph_task_id() != BackwardCall::kNone;
}

bool PassMarks::isWithinBackward() const {
  return (reduces() || isLocal()) && get_current_graph_task_id() != BackwardCall::kNone;
}

void PassMarks::expect(bool any, bool marked) {
  any_graph_ = any;
  began_.forget(); // a checkpoint may ask in the call of the last one
  const std::lock_guard lock(wrappers_mutex);
  wrapper_->asked = ++wrapper_events;
  wrapper_->marked = marked && !any;
}

bool PassMarks::asks() const {
  const std::lock_guard lock(wrappers_mutex);
  return wrapper_->asked != 0;
}

void PassMarks::disarm() {
  const std::lock_guard lock(wrappers_mutex);
  wrapper_->asked = 0;
}

bool PassMarks::mayBeginUnmarked(const at::Tensor& param) const {
  if (any_graph_) {
    return true;
  }
  return !local_call_.running() && !isInAnother(param, CallKind::Local) && !isOfOther(param);
}

GradientCall PassMarks::callOf(const at::Tensor& param, bool armed) const {
  return {get_current_graph_task_id(), armed && mayBeginUnmarked(param), isInAnother(param, CallKind::Local), armed};
}

bool PassMarks::reducesTwice(const at::Tensor& param) const {
  return (reduces() || beganHere()) && isReducedByAnother(param);
}

bool PassMarks::isReducedByAnother(const at::Tensor& param) const {
  return isInAnother(param, CallKind::Began);
}

bool PassMarks::isInAnother(const at::Tensor& param, CallKind least) const {
  return std::any_of(marked_calls.begin(), marked_calls.end(), [&](const MarkedCall& each) {
    const auto theirs = each.wrapper.lock();
    return theirs != nullptr && theirs != wrapper_ && each.call.present() && each.kind >= least && has(*theirs, param);
  });
}

bool PassMarks::anyOther(const at::Tensor& param, const std::function<bool(const MarkedWrapper&)>& is) const {
  const std::lock_guard lock(wrappers_mutex);
  return std::any_of(wrappers.begin(), wrappers.end(), [&](const auto& each) {
    const auto theirs = each.lock();
    return theirs != nullptr && theirs != wrapper_ && has(*theirs, param) && is(*theirs);
  });
}

bool PassMarks::isOfOther(const at::Tensor& param) const {
  return anyOther(param, [this](const MarkedWrapper& theirs) {
    if (theirs.made > wrapper_->asked || theirs.asked < wrapper_->made) {
      return theirs.made > wrapper_->asked;
    }
    return theirs.marked == wrapper_->marked ? theirs.asked > wrapper_->asked : wrapper_->marked;
  });
}

bool PassMarks::isContested(const at::Tensor& param) const {
  return anyOther(param, [this](const MarkedWrapper& theirs) { return theirs.asked > wrapper_->made; });
}

void PassMarks::begin() {
  if (!pending()) {
    call_.forget(); // nothing is known of this call
  }
  begun_ = call_.running();
  any_graph_ = false;
  began_ = outermost_;
  if (!begun_) {
    tellOthers();
  }
}

bool PassMarks::cutOff(const at::Tensor& param) const {
  return !beganHere() && (begun_ || isInAnother(param, CallKind::Local) || isContested(param) || isOfOther(param));
}

void PassMarks::end() {
  began_.forget();
  ended_in_ = get_current_graph_task_id();
}

bool PassMarks::endedNested() const {
  return get_current_graph_task_id() < ended_in_; // the later a call begins, the larger its number
}

void PassMarks::note(size_t param, GradientCall call) {
  if (!beganHere()) { // else it has been counted
    noted_.push_back({param, call});
  }
}

std::vector<size_t> PassMarks::takeNoted(bool armed) {
  std::vector<size_t> params;
  std::erase_if(noted_, [&params, armed](const Noted& each) {
    const bool present = each.call.isOfPresent() && (each.call.armed || !armed);
    if (present) {
      params.push_back(each.param);
    }
    return present;
  });
  return params;
}

bool PassMarks::notedAround(size_t param) const {
  return std::any_of(noted_.begin(), noted_.end(), [param](const Noted& each) {
    return each.param == param && each.call.number < get_current_graph_task_id();
  });
}

void PassMarks::tellOthers() const {
  std::erase_if(marked_calls, [this](const MarkedCall& each) {
    const auto theirs = each.wrapper.lock();
    return theirs == nullptr || theirs == wrapper_ || !each.call.present();
  });
  const BackwardCall& unreduced = isLocal() ? local_call_ : outermost_;
  const CallKind unmarked = beganHere() ? CallKind::Began : CallKind::Local;
  marked_calls.push_back({reduces() ? call_ : unreduced, reduces() ? CallKind::Marked : unmarked, wrapper_});
}

} // namespace pycomm
