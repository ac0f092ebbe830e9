#include "ddp/pass_failure.h"

#include <c10/util/Exception.h>

namespace pycomm {
namespace {

constexpr size_t kNamesShown = 10;

// The first line of an exception's text, without torch's C++ backtrace.
std::string firstLine(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  const std::string text = torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
  return text.substr(0, text.find('\n'));
}

} // namespace

bool PassFailure::record(const std::string& doing, const std::exception& error) {
  if (any()) {
    return false;
  }
  text_ = "while " + doing + ": " + firstLine(error);
  return true;
}

void PassFailure::explain(const std::string& why) {
  text_ += " -- " + why;
}

void PassFailure::forget() noexcept {
  text_.clear();
}

void PassFailure::raise(int rank) const {
  TORCH_CHECK(
      !any(),
      "rank ",
      rank,
      ": an earlier backward pass failed ",
      text_,
      " -- gradients and perhaps parameters differ ",
      "between ranks since then. Start again from a checkpoint with a new process group.");
}

void raiseMissing(int rank, const std::vector<std::string>& names) {
  TORCH_CHECK(
      false,
      "rank ",
      rank,
      ": the last backward pass gave no gradient to ",
      listed(names),
      ", so buckets were not ",
      "reduced and the other ranks may still be waiting for them. If backward raised an error, look for that one. If not, pass "
      "find_unused_parameters=True if these ",
      "parameters take no part in every loss; freeze them if they never do; and let every output of forward() enter ",
      "the loss.");
}

void raiseCutOff(int rank) {
  TORCH_CHECK(
      false,
      "rank ",
      rank,
      ": the last backward pass ended with an error after the last gradient had come, and before its averages were written: "
      "gradients of this rank are its own. Look for that error: it comes from a part of backward that lies before the first "
      "layer, or from an interrupt. Start again from a checkpoint with a new process group.");
}

void raiseSecondGradient(const std::string& name, bool static_graph) {
  TORCH_CHECK(
      false,
      "parameter '",
      name,
      "' got a second gradient in one backward pass. ",
      static_graph ? "The graph is not the one of the first pass: leave static_graph=True out."
                   : "Either it is used again by a checkpointed part of the model (use torch.utils.checkpoint with "
                     "use_reentrant=False, or static_graph=True), or forward's output did not lead to it and "
                     "find_unused_parameters=True counted it as unused.");
}

void raiseFrozen(const std::string& name, bool trained) {
  TORCH_CHECK(
      false,
      "parameter '",
      name,
      "' was ",
      trained ? "frozen" : "unfrozen",
      " after the first backward pass, which static_graph=True does not allow: leave it out");
}

void raiseConverted(const std::string& name, const std::string& before, const std::string& now) {
  TORCH_CHECK(
      false,
      "parameter '",
      name,
      "' is ",
      now,
      " now, and was ",
      before,
      " when the model was wrapped: convert or move a model first, and wrap it then");
}

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size() && i < kNamesShown; ++i) {
    text += (i == 0 ? "'" : ", '") + names[i] + "'";
  }
  const size_t more = names.size() > kNamesShown ? names.size() - kNamesShown : 0;
  return more == 0 ? text : text + " and " + std::to_string(more) + " more parameters";
}

} // namespace pycomm
