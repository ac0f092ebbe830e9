#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "engine/operation/operation.h"

namespace pycomm {

/// Messages to one rank that wait for room there. They are no operations of the protocol yet: one that waits costs its Operation, a
/// pointer and a number. They leave in the order in which they came, or the first under a tag that is asked for; either takes a time
/// that does not depend on how many wait.
/// Thread: the lane's.
class SendQueue {
 public:
  void push(const std::shared_ptr<Operation>& message) {
    const uint32_t tag = message->request().descriptor.tag;
    const auto found = by_tag_.find(tag);
    if (found != by_tag_.end()) {
      found->second->second.messages.push_back({next_, message});
    } else {
      const auto at = lines_.emplace(next_, Line()).first;
      try {
        at->second.messages.push_back({next_, message});
        by_tag_.emplace(tag, at);
      } catch (...) {
        lines_.erase(at);
        throw;
      }
    }
    ++next_;
    ++size_;
  }
  [[nodiscard]] size_t size() const noexcept {
    return size_;
  }
  [[nodiscard]] bool empty() const noexcept {
    return size_ == 0;
  }
  /// The one that has waited longest; null if there is none.
  [[nodiscard]] const Operation* first() const noexcept {
    return empty() ? nullptr : lines_.begin()->second.first().message.get();
  }
  /// Of a queue that is not empty.
  [[nodiscard]] std::shared_ptr<Operation> takeFirst() noexcept {
    return takeFrom(lines_.begin());
  }
  /// Null if none waits under that tag.
  [[nodiscard]] std::shared_ptr<Operation> takeUnder(uint32_t tag) noexcept {
    const auto found = by_tag_.find(tag);
    return found == by_tag_.end() ? nullptr : takeFrom(found->second);
  }
  template <typename Body>
  void forEach(const Body& body) const {
    for (const auto& entry : lines_) {
      const Line& line = entry.second;
      for (size_t i = line.taken; i < line.messages.size(); ++i) {
        body(*line.messages[i].message);
      }
    }
  }

  /// The receiver has asked for a message under a tag of which none is here. The last such tags are kept, each once: the next message
  /// under one of them is wanted.
  void miss(uint32_t tag) {
    if (std::find(missed_.begin(), missed_.end(), tag) == missed_.end()) {
      missed_.push_back(tag);
      if (missed_.size() > kMostMissed) {
        missed_.erase(missed_.begin());
      }
    }
  }
  /// Whether that is one of those tags; it is no longer.
  bool takeMissed(uint32_t tag) noexcept {
    const auto found = std::find(missed_.begin(), missed_.end(), tag);
    const bool missed = found != missed_.end();
    if (missed) {
      missed_.erase(found);
    }
    return missed;
  }

  /// Under way, and perhaps announced before their data: too large to go eagerly, or asked for. Their receiver keeps a note of each.
  std::unordered_set<uint64_t> announced;

 private:
  static constexpr size_t kMostMissed = 64;

  struct Waiting {
    uint64_t number; ///< rises
    std::shared_ptr<Operation> message;
  };
  /// The messages under one tag.
  struct Line {
    std::vector<Waiting> messages;
    size_t taken = 0; ///< of them, which are null
    [[nodiscard]] const Waiting& first() const noexcept {
      return messages[taken];
    }
  };
  using Lines = std::map<uint64_t, Line>;

  std::shared_ptr<Operation> takeFrom(Lines::iterator at) noexcept {
    Line& line = at->second;
    std::shared_ptr<Operation> message = std::move(line.messages[line.taken++].message);
    const auto tag = by_tag_.find(message->request().descriptor.tag);
    --size_;
    if (line.taken == line.messages.size()) {
      by_tag_.erase(tag);
      lines_.erase(at);
      return message;
    }
    if (line.taken * 2 > line.messages.size()) {
      line.messages.erase(line.messages.begin(), line.messages.begin() + static_cast<std::ptrdiff_t>(line.taken));
      line.taken = 0;
    }
    auto node = lines_.extract(at);
    node.key() = line.first().number;
    tag->second = lines_.insert(std::move(node)).position;
    return message;
  }

  Lines lines_; ///< by the number of their first message; none is empty
  std::unordered_map<uint32_t, Lines::iterator> by_tag_; ///< all of them
  std::vector<uint32_t> missed_; ///< oldest first
  uint64_t next_ = 0;
  size_t size_ = 0;
};

} // namespace pycomm
