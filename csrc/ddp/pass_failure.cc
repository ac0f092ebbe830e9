#include "ddp/pass_failure.h"

#include <ATen/core/TensorBody.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <sstream>
#include <thread>
#include <utility>

#include "base/wait_point.h"

namespace pycomm {
namespace {

constexpr size_t kNamesShown = 10;

constexpr std::chrono::milliseconds kLookEvery{20};

std::string keyOf(int rank) {
  return "trained/" + std::to_string(rank);
}

std::string keyOf(int64_t failure, int rank) {
  return "parts/" + std::to_string(failure) + "/" + std::to_string(rank);
}

std::string textOf(const std::vector<bool>& trained) {
  std::string text;
  for (const bool each : trained) {
    text += each ? '1' : '0';
  }
  return text;
}

std::string textOf(const SharedValues::Parts& parts) {
  std::string text;
  for (const uint32_t part : parts) {
    text += std::to_string(part) + " ";
  }
  return text;
}

} // namespace

// --- what happened -------------------------------------------------------------------------------

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

void raiseReducedTwice(const std::string& name) {
  TORCH_CHECK(
      false,
      "parameter '",
      name,
      "' belongs to two DistributedDataParallel wrappers, and one backward pass goes through both: each would reduce what the other one "
      "has. Wrap a module that contains both, or call backward() for each of them");
}

void raiseLeftNested() {
  TORCH_CHECK(
      false,
      "gradients of the last backward pass were not averaged: they came in a backward call inside another one, as of a checkpoint with "
      "use_reentrant=True, and the outer one reached no output of forward and no parameter. Use torch.utils.checkpoint with "
      "use_reentrant=False for what the loss does with parameters alone");
}

void raiseRepeated(const std::vector<std::string>& names) {
  TORCH_CHECK(
      false,
      "a checkpoint repeated forward() in backward, so that gradients were to be averaged, and ",
      listed(names),
      " got none after it. If forward() was in no_sync(), call backward() in no_sync(), too, or return tensors that the wrapper finds. If "
      "not, use these parameters inside the checkpoint alone; or pass find_unused_parameters=True if the loss does not use them");
}

void raiseRepeatedStatic() {
  TORCH_CHECK(
      false,
      "a checkpoint repeated forward() in backward, so that gradients were to be averaged, and the wrapper does not find the outputs that end the "
      "first pass of a static graph. If forward() was in no_sync(), call backward() in no_sync(), too, or return tensors that the wrapper finds; "
      "or leave static_graph=True out");
}

void raiseAroundNested(const std::string& name) {
  TORCH_CHECK(
      false,
      "parameter '",
      name,
      "' got a gradient in the backward call around the one in which the others were averaged: the wrapper runs in a checkpoint with "
      "use_reentrant=True, and the loss uses this parameter beside it. Use torch.utils.checkpoint with use_reentrant=False");
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

std::string firstLine(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  const std::string text = torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
  return text.substr(0, text.find('\n'));
}

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size() && i < kNamesShown; ++i) {
    text += (i == 0 ? "'" : ", '") + names[i] + "'";
  }
  const size_t more = names.size() > kNamesShown ? names.size() - kNamesShown : 0;
  return more == 0 ? text : text + " and " + std::to_string(more) + " more parameters";
}

// --- which state differs -------------------------------------------------------------------------

std::vector<bool> readTrained(const std::vector<ReducedParam>& params) {
  std::vector<bool> trained;
  for (const ReducedParam& param : params) {
    trained.push_back(param.tensor.requires_grad());
  }
  return trained;
}

StateReports::StateReports(c10::intrusive_ptr<c10d::Store> store, int rank, JobRanks job, std::vector<bool> trained)
    : store_(std::move(store)), rank_(rank), job_(std::move(job)), at_first_(std::move(trained)) {}

void StateReports::publishTrained(const std::vector<bool>& trained) {
  if (store_ != nullptr) {
    store_->set(keyOf(rank_), textOf(trained));
  }
}

void StateReports::changeRanks(int rank, JobRanks job) {
  store_.reset();
  rank_ = rank;
  job_ = std::move(job);
}

void StateReports::share(c10::intrusive_ptr<c10d::Store> store, const std::vector<bool>& trained) {
  store_ = std::move(store);
  at_first_ = trained;
  publishTrained(trained);
}

std::optional<std::string> StateReports::trainedDifference(
    const std::vector<bool>& trained,
    const std::vector<ReducedParam>& params,
    int world_size) const {
  if (store_ == nullptr) {
    return std::nullopt;
  }
  const std::string mine = textOf(trained);
  for (int rank = 0; rank < world_size; ++rank) {
    std::string theirs;
    try {
      theirs = store_->check({keyOf(rank)}) ? store_->get_to_str(keyOf(rank)) : textOf(at_first_);
    } catch (const std::exception&) {
      return std::nullopt;
    }
    for (size_t index = 0; rank != rank_ && index < std::min(mine.size(), theirs.size()); ++index) {
      if (mine[index] == theirs[index]) {
        continue;
      }
      const std::string here = job_.text(rank_);
      const std::string there = job_.text(rank);
      const bool trained_here = mine[index] == '1';
      return "parameter '" + params.at(index).name + "' is trained on " + (trained_here ? here : there) +
          " and frozen on " + (trained_here ? there : here) +
          ": freeze and unfreeze parameters on all ranks alike, before the same forward pass";
    }
  }
  return std::nullopt;
}

std::optional<std::string> StateReports::partsDifference(
    const SharedValues::Parts& parts,
    int64_t failure,
    int world_size,
    std::chrono::milliseconds timeout) const {
  if (store_ == nullptr) {
    return std::nullopt;
  }
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::vector<int> missing;
  for (int rank = 0; rank < world_size; ++rank) {
    if (rank != rank_) {
      missing.push_back(rank);
    }
  }
  std::optional<std::string> difference;
  try {
    store_->set(keyOf(failure, rank_), textOf(parts));
    while (true) {
      // Each in turn, again and again: one that does not report at all takes no time from the others.
      std::erase_if(missing, [&](int rank) {
        if (difference || !store_->check({keyOf(failure, rank)})) {
          return false;
        }
        difference = differenceTo(rank, parts, store_->get_to_str(keyOf(failure, rank)));
        return true;
      });
      if (difference || missing.empty() || std::chrono::steady_clock::now() >= deadline) {
        return difference;
      }
      beforeWait();
      std::this_thread::sleep_for(kLookEvery);
    }
  } catch (const std::exception&) { // the store is gone, or another process has it
    return std::nullopt;
  }
}

std::optional<std::string> StateReports::differenceTo(
    int rank,
    const SharedValues::Parts& parts,
    const std::string& text) const {
  SharedValues::Parts theirs{};
  std::istringstream words(text);
  for (uint32_t& part : theirs) {
    words >> part;
  }
  std::string differing;
  for (size_t part = 0; part < parts.size(); ++part) {
    if (parts[part] != theirs[part]) {
      differing += (differing.empty() ? "" : ", ") + std::string(SharedValues::kNames[part]);
    }
  }
  if (differing.empty()) {
    return std::nullopt;
  }
  return "the reducers of " + job_.text(rank_) + " and " + job_.text(rank) + " differ in " + differing +
      ": load communication_state_dict(), and call _reset_state() or _update_process_group(), on all ranks or on none";
}

} // namespace pycomm
