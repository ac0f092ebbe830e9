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

/// Messages to one rank that wait: for room there, for their own bytes (held), or behind a held one of their tag. They are no operations of
/// the protocol yet: one that waits costs its Operation, a pointer and a number. They leave in the order in which they came, or the first
/// under a tag that is asked for; either takes a time that does not depend on how many wait. No message passes another one of its tag, so
/// all messages behind a held one stay until release().
/// Thread: the data loop's.
class SendQueue {
 public:
  void push(const std::shared_ptr<Operation>& message, bool held = false) {
    const uint32_t tag = message->request().descriptor.tag;
    const auto found = by_tag_.find(tag);
    if (found != by_tag_.end()) {
      found->second->second.messages.push_back({next_, message, held});
    } else {
      Lines& lines = held ? blocked_ : ready_;
      const auto at = lines.emplace(next_, Line()).first;
      try {
        at->second.messages.push_back({next_, message, held});
        by_tag_.emplace(tag, at);
      } catch (...) {
        lines.erase(at);
        throw;
      }
    }
    ++next_;
    ++size_;
  }
  /// A held message that waits here may leave from now on, after those before it.
  void release(const Operation& message) noexcept {
    const auto found = by_tag_.find(message.request().descriptor.tag);
    if (found == by_tag_.end()) {
      return;
    }
    Line& line = found->second->second;
    const auto at = std::find_if(
        line.messages.begin() + static_cast<std::ptrdiff_t>(line.taken), line.messages.end(), [&](const Waiting& one) {
          return one.message.get() == &message;
        });
    if (at == line.messages.end() || !std::exchange(at->held, false)) {
      return;
    }
    if (&*at == &line.first()) {
      found->second = ready_.insert(blocked_.extract(found->second)).position;
    }
  }
  /// All that wait.
  [[nodiscard]] size_t size() const noexcept {
    return size_;
  }
  /// A message under that tag waits.
  [[nodiscard]] bool has(uint32_t tag) const noexcept {
    return by_tag_.count(tag) != 0;
  }
  /// A message waits that could leave now.
  [[nodiscard]] bool isReady() const noexcept {
    return !ready_.empty();
  }
  /// The one of those that has waited longest; null if there is none.
  [[nodiscard]] const Operation* firstReady() const noexcept {
    return isReady() ? ready_.begin()->second.first().message.get() : nullptr;
  }
  /// Of a queue that is ready.
  [[nodiscard]] std::shared_ptr<Operation> takeFirst() noexcept {
    return takeFrom(ready_.begin());
  }
  /// Null if none waits under that tag, or if the first one is held.
  [[nodiscard]] std::shared_ptr<Operation> takeUnder(uint32_t tag) noexcept {
    const auto found = by_tag_.find(tag);
    return found == by_tag_.end() || found->second->second.first().held ? nullptr : takeFrom(found->second);
  }
  /// The one of all that has waited longest; null if there is none.
  [[nodiscard]] const Operation* oldest() const noexcept {
    const Lines::const_iterator ready = ready_.begin();
    const Lines::const_iterator blocked = blocked_.begin();
    if (ready == ready_.end() && blocked == blocked_.end()) {
      return nullptr;
    }
    const bool is_ready = ready != ready_.end() && (blocked == blocked_.end() || ready->first < blocked->first);
    return (is_ready ? ready : blocked)->second.first().message.get();
  }
  /// `behind`: the held message that it waits for, which may be itself; null if there is none.
  template <typename Body>
  void forEach(const Body& body) const {
    for (const Lines* lines : {&ready_, &blocked_}) {
      for (const auto& [number, line] : *lines) {
        const Operation* behind = nullptr;
        for (size_t i = line.taken; i < line.messages.size(); ++i) {
          behind = behind == nullptr && line.messages[i].held ? line.messages[i].message.get() : behind;
          body(*line.messages[i].message, behind);
        }
      }
    }
  }
  /// Takes all, for `end`.
  template <typename End>
  void takeAll(const End& end) noexcept {
    while (size_ > 0) {
      end(*takeFrom((ready_.empty() ? blocked_ : ready_).begin()));
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

  /// Ids of those under way that may have been announced before their data: too large to go eagerly, or asked for. Their receiver keeps a note
  /// of each that was.
  std::unordered_set<uint64_t> maybe_announced;

 private:
  static constexpr size_t kMostMissed = 64;

  struct Waiting {
    uint64_t number; ///< rises
    std::shared_ptr<Operation> message;
    bool held;
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
    const bool is_held = line.first().held;
    std::shared_ptr<Operation> message = std::move(line.messages[line.taken++].message);
    const auto tag = by_tag_.find(message->request().descriptor.tag);
    --size_;
    if (line.taken == line.messages.size()) {
      by_tag_.erase(tag);
      (is_held ? blocked_ : ready_).erase(at);
      return message;
    }
    if (line.taken * 2 > line.messages.size()) {
      line.messages.erase(line.messages.begin(), line.messages.begin() + static_cast<std::ptrdiff_t>(line.taken));
      line.taken = 0;
    }
    auto node = (is_held ? blocked_ : ready_).extract(at);
    node.key() = line.first().number;
    tag->second = (line.first().held ? blocked_ : ready_).insert(std::move(node)).position;
    return message;
  }

  // By the number of their first message; none is empty.
  Lines ready_;
  Lines blocked_; ///< those whose first message is held
  std::unordered_map<uint32_t, Lines::iterator> by_tag_; ///< all of them
  std::vector<uint32_t> missed_; ///< oldest first
  uint64_t next_ = 0;
  size_t size_ = 0;
};

} // namespace pycomm
