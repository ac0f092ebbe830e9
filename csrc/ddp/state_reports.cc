#include "ddp/state_reports.h"

#include <ATen/core/TensorBody.h>

#include <algorithm>
#include <exception>
#include <sstream>
#include <thread>
#include <utility>

#include "base/wait_point.h"

namespace pycomm {
namespace {

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
