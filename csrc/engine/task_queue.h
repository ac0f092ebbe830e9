#pragma once

#include <atomic>
#include <functional>
#include <utility>

namespace pycomm {

/// Many threads put tasks in, one takes them out, in order for each thread that puts. Lock-free: a stack that the taker
/// takes whole and reverses (Treiber 1986; taking all at once leaves no room for the ABA problem).
class TaskQueue {
 public:
  using Task = std::function<void()>;

  TaskQueue() = default;
  TaskQueue(const TaskQueue&) = delete;
  TaskQueue& operator=(const TaskQueue&) = delete;
  ~TaskQueue() {
    Node* node = head_.load(std::memory_order_acquire);
    while (node != nullptr) {
      delete std::exchange(node, node->next);
    }
  }

  void push(Task task) {
    Node* node = new Node{std::move(task), head_.load(std::memory_order_relaxed)};
    // Sequentially consistent, as empty(): see there.
    while (!head_.compare_exchange_weak(node->next, node, std::memory_order_seq_cst, std::memory_order_relaxed)) {
    }
  }

  /// Sequentially consistent, so that it can be paired with a sleep flag (see EventLoop::nudge).
  [[nodiscard]] bool empty() const noexcept {
    return head_.load(std::memory_order_seq_cst) == nullptr;
  }

  /// Runs everything that was in the queue when called; true if there was something.
  bool runAll() {
    Node* taken = head_.exchange(nullptr, std::memory_order_acquire);
    Node* in_order = nullptr;
    while (taken != nullptr) {
      Node* next = taken->next;
      taken->next = in_order;
      in_order = taken;
      taken = next;
    }
    const bool any = in_order != nullptr;
    while (in_order != nullptr) {
      Node* node = std::exchange(in_order, in_order->next);
      node->task();
      delete node;
    }
    return any;
  }

 private:
  struct Node {
    Task task;
    Node* next;
  };
  std::atomic<Node*> head_{nullptr};
};

} // namespace pycomm
