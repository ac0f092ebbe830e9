#include "ddp/grad_hooks.h"

#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include <algorithm>
#include <memory>
#include <unordered_set>

#include "ddp/graph_marks.h"

namespace pycomm {

using torch::autograd::Node;
using torch::autograd::variable_list;

GradHooks::GradHooks(
    const std::vector<ReducedParam>& params,
    const std::vector<bool>& hooked,
    const OnGradient& on_gradient) {
  hooked_.reserve(params.size());
  try {
    for (size_t index = 0; index < params.size(); ++index) {
      if (hooked[index]) {
        addHook(params[index].tensor, index, on_gradient);
      }
    }
  } catch (...) {
    remove(); // a graph may keep the accumulators alive, and with them hooks whose owner is gone
    throw;
  }
}

void GradHooks::addHook(const at::Tensor& param, size_t index, const OnGradient& on_gradient) {
  NodePtr accumulator = torch::autograd::impl::grad_accumulator(param);
  TORCH_CHECK(accumulator, "parameter ", index, " is not a leaf that requires a gradient");
  auto hook = std::make_unique<torch::autograd::utils::LambdaPostHook>(
      [on_gradient, index](const variable_list& outputs, const variable_list& /*inputs*/) {
        on_gradient(index);
        return outputs;
      },
      [](torch::autograd::CompiledNodeArgs& /*args*/) {
        // Compiled autograd records a node's hooks through this function and never calls the C++ ones: without an
        // error here gradients would silently stay local.
        raiseCompiledAutograd();
      });
  index_of_[accumulator.get()] = index;
  const uintptr_t key = accumulator->add_post_hook(std::move(hook));
  hooked_.push_back({param, std::move(accumulator), key}); // there is room: it cannot throw, which would leave the hook
}

GradHooks::~GradHooks() {
  remove();
}

void GradHooks::remove() {
  for (const Hooked& hooked : hooked_) {
    hooked.accumulator->del_post_hook(hooked.key);
  }
  hooked_.clear();
  index_of_.clear();
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
      unreached.push_back(index_of_.at(hooked.accumulator.get()));
    }
  }
  return unreached;
}

} // namespace pycomm
