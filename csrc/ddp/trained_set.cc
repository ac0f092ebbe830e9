#include "ddp/trained_set.h"

#include <ATen/core/TensorBody.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace pycomm {
namespace {

std::string keyOf(int rank) {
  return "trained/" + std::to_string(rank);
}

std::string textOf(const std::vector<bool>& trained) {
  std::string text;
  for (const bool each : trained) {
    text += each ? '1' : '0';
  }
  return text;
}

} // namespace

TrainedSet::TrainedSet(
    c10::intrusive_ptr<c10d::Store> store,
    int rank,
    JobRanks job,
    const std::vector<ReducedParam>& params)
    : store_(std::move(store)), rank_(rank), job_(std::move(job)), trained_(read(params)), at_first_(trained_) {}

std::optional<size_t> TrainedSet::changed(const std::vector<ReducedParam>& params) const {
  for (size_t index = 0; index < params.size(); ++index) {
    if (params[index].tensor.requires_grad() != trained_[index]) {
      return index;
    }
  }
  return std::nullopt;
}

std::vector<bool> TrainedSet::read(const std::vector<ReducedParam>& params) {
  std::vector<bool> trained;
  for (const ReducedParam& param : params) {
    trained.push_back(param.tensor.requires_grad());
  }
  return trained;
}

void TrainedSet::take(std::vector<bool> trained) noexcept {
  trained_ = std::move(trained);
}

void TrainedSet::publish() {
  if (store_ != nullptr) {
    store_->set(keyOf(rank_), textOf(trained_));
  }
}

void TrainedSet::changeRanks(int rank) {
  store_.reset();
  rank_ = rank;
}

std::optional<std::string> TrainedSet::difference(const std::vector<ReducedParam>& params, int world_size) const {
  if (store_ == nullptr) {
    return std::nullopt;
  }
  const std::string mine = textOf(trained_);
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

} // namespace pycomm
