// What a reducer says of passes that did not end well.
#include "c10d/python_errors.h"
#include "ddp/reducer.h"

namespace pycomm {
namespace {

constexpr size_t kNamesShown = 10;

// The first line of an exception's text, without torch's C++ backtrace.
std::string firstLine(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  const std::string text = torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
  return text.substr(0, text.find('\n'));
}

template <typename NameOf>
std::string listed(const std::vector<size_t>& indices, const NameOf& name_of) {
  std::string text;
  for (size_t i = 0; i < indices.size() && i < kNamesShown; ++i) {
    text += (i == 0 ? "'" : ", '") + name_of(indices[i]) + "'";
  }
  const size_t more = indices.size() > kNamesShown ? indices.size() - kNamesShown : 0;
  return more == 0 ? text : text + " and " + std::to_string(more) + " more parameters";
}

} // namespace

void Reducer::fail(const std::string& doing, const std::exception& error) {
  if (!failure_.empty()) {
    return;
  }
  failure_ = "while " + doing + ": " + firstLine(error);
  if (standsFor(error, ErrorCode::CollectiveMismatch)) {
    const std::string why = whyMismatched();
    if (!why.empty()) {
      failure_ += " -- " + why;
      addNote(error, why);
    }
  }
  if (hook_ == nullptr) {
    return;
  }
  // A comm hook may have raised here alone. The others would wait for its collectives until the deadline.
  try {
    group_->getBackend(c10::DeviceType::CPU)->abort();
  } catch (const std::exception&) { // a backend that cannot: there the deadline remains
  }
}

// Asked only after a mismatch, which tells that all ranks are there to answer.
std::string Reducer::whyMismatched() const {
  std::vector<std::string> names;
  for (const ReducedParam& param : params_) {
    names.push_back(param.name);
  }
  try {
    return trained_set_->difference(names, group_->getSize()).value_or("");
  } catch (const std::exception&) { // a store that is gone: the mismatch itself is said anyway
    return "";
  }
}

void Reducer::throwIfUnfinished() const {
  const int rank = group_->getRank();
  TORCH_CHECK(
      failure_.empty(),
      "rank ",
      rank,
      ": an earlier backward pass failed ",
      failure_,
      " -- gradients and perhaps parameters differ ",
      "between ranks since then. Start again from a checkpoint with a new process group.");
  TORCH_CHECK(
      pass_ != Pass::Reducing,
      "rank ",
      rank,
      ": the last backward pass gave no gradient to ",
      namesOfMissing(),
      ", so buckets were not ",
      "reduced and the other ranks may still be waiting for them. Pass find_unused_parameters=True if these ",
      "parameters take no part in every loss; freeze them if they never do; and let every output of forward() enter ",
      "the loss.");
}

std::string Reducer::namesOfMissing() const {
  std::vector<size_t> missing;
  for (size_t index = 0; index < ready_.size(); ++index) {
    if (trainable_[index] && !ready_[index]) {
      missing.push_back(index);
    }
  }
  return listed(missing, [&](size_t index) { return params_[index].name; });
}

std::string Reducer::namesInBucket(size_t bucket) const {
  std::vector<size_t> indices;
  for (const Slot& slot : buckets_.all()[bucket].slots()) {
    indices.push_back(slot.index);
  }
  return listed(indices, [&](size_t index) { return params_[index].name; });
}

void Reducer::checkHookMayBeSet() const {
  TORCH_CHECK(hook_ == nullptr, "a comm hook has been registered already; there can be one");
  TORCH_CHECK(
      pass_ != Pass::Reducing && stats_.passes == 0, "a comm hook must be registered before the first backward pass");
}

} // namespace pycomm
