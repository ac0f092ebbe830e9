// Whether tensors share memory. Lists may hold one tensor per rank, so pairs are found by sorting and not by trying all.
#include <ATen/MemoryOverlap.h>
#include <ATen/core/TensorBody.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "base/error.h"
#include "c10d/tensor_checks.h"

namespace pycomm {
namespace {

struct Extent {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  size_t index = 0;
};

Extent extentOf(const at::Tensor& tensor, size_t index) {
  const auto begin = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  return {begin, begin + static_cast<uintptr_t>(tensor.numel()) * tensor.element_size(), index};
}

/// Where the tensors that have memory without gaps lie, in order.
std::vector<Extent> extentsOf(const std::vector<at::Tensor>& tensors) {
  std::vector<Extent> extents;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].numel() > 0 && tensors[i].is_non_overlapping_and_dense()) {
      extents.push_back(extentOf(tensors[i], i));
    }
  }
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  return extents;
}

[[noreturn]] void refuse(
    const char* op,
    const std::string& what,
    const char* hint,
    const at::Tensor* tensor = nullptr) {
  ErrorRecord record;
  if (tensor != nullptr) {
    record.dtype = c10::toString(tensor->scalar_type());
    record.numel = tensor->numel();
  }
  record.code = ErrorCode::InvalidArgument;
  record.op = op;
  record.summary = std::string(op) + ": " + what + ", so the result would depend on the order in which bytes arrive.";
  record.hint = hint;
  throw Error(record);
}

[[noreturn]] void refusePair(const char* op) {
  refuse(op, "an input and an output tensor share memory", "pass input.clone()");
}

bool overlap(const Extent& a, const Extent& b) {
  return a.begin < b.end && b.begin < a.end;
}

} // namespace

void checkOutput(const at::Tensor& tensor, const char* op) {
  checkTensor(tensor, op, "output");
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    refuse(
        op,
        "several elements of the output tensor share memory",
        "pass output.contiguous(), and copy the result back",
        &tensor);
  }
}

void checkOutputs(const std::vector<at::Tensor>& tensors, const char* op) {
  checkTensors(tensors, op, "output");
  for (const at::Tensor& tensor : tensors) {
    checkOutput(tensor, op);
  }
  const std::vector<Extent> extents = extentsOf(tensors);
  for (size_t i = 1; i < extents.size(); ++i) {
    if (overlap(extents[i - 1], extents[i])) {
      refuse(
          op,
          "output tensors " + std::to_string(std::min(extents[i - 1].index, extents[i].index)) + " and " +
              std::to_string(std::max(extents[i - 1].index, extents[i].index)) + " share memory",
          "pass a tensor of its own for each");
    }
  }
}

void checkApart(const std::vector<at::Tensor>& parts, const at::Tensor& tensor, int own, const char* op) {
  if (tensor.numel() == 0 || !tensor.is_non_overlapping_and_dense()) {
    return;
  }
  const Extent single = extentOf(tensor, 0);
  for (const Extent& part : extentsOf(parts)) {
    const bool in_place =
        part.index == static_cast<size_t>(own) && part.begin == single.begin && part.end == single.end;
    if (overlap(part, single) && !in_place) {
      refusePair(op);
    }
  }
}

void checkDisjoint(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs, const char* op) {
  const std::vector<Extent> written = extentsOf(outputs); // disjoint among themselves: checkOutputs has seen to that
  for (const Extent& input : extentsOf(inputs)) {
    const auto at = std::upper_bound(
        written.begin(), written.end(), input.begin, [](uintptr_t begin, const Extent& e) { return begin < e.end; });
    if (at != written.end() && overlap(*at, input)) {
      refusePair(op);
    }
  }
}

void checkPart(const at::Tensor& whole, const at::Tensor& part, int slot, const char* op) {
  if (whole.numel() == 0 || !whole.is_non_overlapping_and_dense() || !part.is_non_overlapping_and_dense()) {
    return;
  }
  const Extent own = extentOf(part, 0);
  const Extent all = extentOf(whole, 0);
  const bool in_place = own.begin == all.begin + static_cast<uintptr_t>(slot) * (own.end - own.begin) &&
      whole.is_contiguous() && part.is_contiguous();
  if (overlap(own, all) && !in_place) {
    refusePair(op);
  }
}

} // namespace pycomm
