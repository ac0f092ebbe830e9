#include "ddp/trained_set.h"

#include <algorithm>
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

TrainedSet::TrainedSet(c10::intrusive_ptr<c10d::Store> store, int rank, std::vector<bool> trained)
    : store_(std::move(store)), rank_(rank), at_first_(std::move(trained)), trained_(at_first_) {}

void TrainedSet::change(std::vector<bool> trained) {
  trained_ = std::move(trained);
  if (store_ != nullptr) {
    store_->set(keyOf(rank_), textOf(trained_));
  }
}

std::optional<std::string> TrainedSet::difference(const std::vector<std::string>& names, int world_size) const {
  if (store_ == nullptr) {
    return std::nullopt;
  }
  const std::string mine = textOf(trained_);
  for (int rank = 0; rank < world_size; ++rank) {
    const std::string theirs = store_->check({keyOf(rank)}) ? store_->get_to_str(keyOf(rank)) : textOf(at_first_);
    for (size_t index = 0; rank != rank_ && index < std::min(mine.size(), theirs.size()); ++index) {
      if (mine[index] == theirs[index]) {
        continue;
      }
      const std::string here = "rank " + std::to_string(rank_);
      const std::string there = "rank " + std::to_string(rank);
      const bool trained_here = mine[index] == '1';
      return "parameter '" + names.at(index) + "' is trained on " + (trained_here ? here : there) + " and frozen on " +
          (trained_here ? there : here) +
          ": freeze and unfreeze parameters on all ranks alike, before the same forward pass";
    }
  }
  return std::nullopt;
}

} // namespace pycomm
