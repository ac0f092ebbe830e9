#pragma once

#include <cstddef>
#include <new>
#include <type_traits>
#include <utility>

namespace pycomm {

/// Something to run once, on another thread. Small closures lie in the object itself.
///
/// Not std::function, which puts all but the smallest into malloc's memory: the thread that frees it is not the one that made it, so
/// such blocks pile up on one side while the other side takes new ones, between the gradients that it allocates meanwhile. Those holes
/// cost a training process up to three times its gradients in resident memory (glibc 2.36).
class Task {
 public:
  template <typename Closure, typename = std::enable_if_t<!std::is_same_v<std::decay_t<Closure>, Task>>>
  Task(Closure&& closure) { // NOLINT: posting a lambda reads best
    using Held = std::decay_t<Closure>;
    if constexpr (kFits<Held>) {
      new (room_) Held(std::forward<Closure>(closure));
      how_ = &kInside<Held>;
    } else {
      new (room_) Held*(new Held(std::forward<Closure>(closure)));
      how_ = &kOutside<Held>;
    }
  }
  Task(Task&& other) noexcept : how_(std::exchange(other.how_, nullptr)) {
    if (how_ != nullptr) {
      how_->move(room_, other.room_);
    }
  }
  Task& operator=(Task&& other) = delete;
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;
  ~Task() {
    if (how_ != nullptr) {
      how_->destroy(room_);
    }
  }

  void operator()() {
    how_->run(room_);
  }

 private:
  static constexpr size_t kRoomNbytes = 56; // with how_ a cache line

  struct How {
    void (*run)(std::byte*);
    void (*move)(std::byte* to, std::byte* from) noexcept; ///< and ends what was in `from`
    void (*destroy)(std::byte*) noexcept;
  };

  template <typename Held>
  static Held& in(std::byte* room) noexcept {
    return *std::launder(reinterpret_cast<Held*>(room));
  }

  template <typename Held>
  static constexpr bool kFits = sizeof(Held) <= kRoomNbytes && alignof(Held) <= alignof(std::max_align_t) &&
      std::is_nothrow_move_constructible_v<Held>;

  template <typename Held>
  static constexpr How kInside{
      [](std::byte* room) { in<Held>(room)(); },
      [](std::byte* to, std::byte* from) noexcept {
        new (to) Held(std::move(in<Held>(from)));
        in<Held>(from).~Held();
      },
      [](std::byte* room) noexcept { in<Held>(room).~Held(); }};

  template <typename Held>
  static constexpr How kOutside{
      [](std::byte* room) { (*in<Held*>(room))(); },
      [](std::byte* to, std::byte* from) noexcept { new (to) Held*(in<Held*>(from)); },
      [](std::byte* room) noexcept { delete in<Held*>(room); }};

  alignas(std::max_align_t) std::byte room_[kRoomNbytes];
  const How* how_ = nullptr;
};

} // namespace pycomm
