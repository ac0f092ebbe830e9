#include "ddp/graph_marks.h"

#include <ATen/core/TensorBody.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>
#include <utility>

namespace pycomm {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

class EntryHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit EntryHook(std::function<void()> on_entry) : on_entry_(std::move(on_entry)) {}

  variable_list operator()(const variable_list& grads) override {
    on_entry_();
    return grads;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {
    raiseCompiledAutograd();
  }

 private:
  std::function<void()> on_entry_;
};

} // namespace

void BackwardCall::follow() {
  auto over = std::make_shared<std::atomic<bool>>(false);
  over_ = over;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [over] { over->store(true, std::memory_order_release); });
}

bool markGraph(const std::vector<at::Tensor>& outputs, const std::function<void()>& on_entry) {
  std::unordered_set<const Node*> marked;
  const auto mark = [&](const at::TensorBase& output) {
    const auto& node = output.grad_fn();
    if (node != nullptr && marked.insert(node.get()).second) {
      node->add_pre_hook(std::make_unique<EntryHook>(on_entry));
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

void raiseCompiledAutograd() {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      "compiled autograd does not call the reduction hooks of pycomm.DistributedDataParallel. Turn compiled "
      "autograd off, or set torch._dynamo.config.optimize_ddp = \"python_reducer\" before wrapping the model, without "
      "wire_dtype, error_feedback, accumulate and sync_every.");
}

} // namespace pycomm
