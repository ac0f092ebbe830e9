#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/unique_fd.h"

namespace pycomm {

/// Tells within a millisecond or so that another process of this host has ended, however much memory it held.
///
/// The kernel frees a killed process's memory before it closes its sockets: with 4 GB resident that takes some 400 ms, and a pidfd is
/// as late. Robust futexes are settled before the memory goes: each thread may leave the kernel a list of words in shared memory, and
/// as the thread ends, the kernel marks those that still hold its thread id and wakes who waits on them (man 2 set_robust_list).
///
/// One thread of this class's own does both halves. Its words, in a sealed memfd without a name, say "alive" to others; and it sleeps
/// on the words that others lent to this process. It is not a pthread robust mutex, although that is the documented user of the list:
/// a mutex can be waited for one at a time only, and the layout of its word is glibc's secret. glibc registers a list for every thread;
/// this thread puts its own in its place, which nothing minds, because it takes no pthread mutex of the robust kind.
///
/// One word for each watcher, since the kernel wakes one waiter a word, and that one may be stopped.
class DeathWatch {
 public:
  /// Told on the watch's own thread, once for each: must not block, throw, or call back.
  using Died = std::function<void(uint64_t watch)>;

  static constexpr uint32_t kWords = 512;
  static constexpr size_t kStride = 8; ///< bytes from word to word: that of the pointers in the robust list
  static constexpr size_t kNbytes = kWords * kStride;

  /// Throws Error(SystemError | TooManyFiles) where the kernel or a sandbox lacks something.
  explicit DeathWatch(Died died);
  /// Like stop(). In a child of fork() it may not be called: there, keep the object.
  ~DeathWatch();
  DeathWatch(const DeathWatch&) = delete;
  DeathWatch& operator=(const DeathWatch&) = delete;

  /// The words, to be passed to another process together with a number from lend().
  [[nodiscard]] int wordsFd() const noexcept {
    return words_fd_.get();
  }
  /// A word that says from now on that this process is alive; none when all are lent.
  [[nodiscard]] std::optional<uint32_t> lend();
  void takeBack(uint32_t word) noexcept;

  /// Watches a word that another process has lent. Throws Error(ProtocolViolation) if the descriptor is not what wordsFd() gives:
  /// reading it must never raise a signal.
  [[nodiscard]] uint64_t watch(const UniqueFd& words, uint32_t word);
  /// Never waits; `died` may still be under way.
  void unwatch(uint64_t watch) noexcept;

  /// Leaves in order: the words say so before the thread ends. Joins the thread. Idempotent.
  void stop() noexcept;

 private:
  /// The kernel's struct robust_list_head and robust_list (linux/futex.h), which has no C++ name everywhere.
  struct Node {
    Node* next = nullptr;
  };
  struct Head {
    Node list; ///< circular
    long futex_offset = 0; ///< from a node to its word
    Node* pending = nullptr;
  };
  struct Watched {
    uint64_t id = 0;
    const std::atomic<uint32_t>* word = nullptr; ///< in `page`
    void* page = nullptr;
    uint32_t alive = 0; ///< what the word says while its owner lives
  };

  void openWords();
  [[nodiscard]] std::atomic<uint32_t>& word(uint32_t index) noexcept;
  void threadMain(std::atomic<int>& started) noexcept;
  void look() noexcept;
  void sleep(uint32_t seen) noexcept;
  void poke() noexcept;

  const Died died_;
  UniqueFd words_fd_;
  std::byte* words_ = nullptr; ///< kNbytes of shared memory
  std::array<Node, kWords>
      nodes_; ///< one a word, linked once and never changed: a word that is not lent holds no thread's id
  Head head_;
  uint32_t own_id_ = 0; ///< of the thread

  std::atomic<uint32_t> changes_{0}; ///< a futex: what the thread must look at again
  std::atomic<bool> stopping_{false};
  bool wait_many_ = true; ///< the thread's: the kernel has futex_waitv
  int failures_ = 0; ///< the thread's: of futex_waitv, in a row

  std::mutex mutex_; ///< guards the rest
  std::vector<Watched> watched_;
  std::vector<bool> lent_;
  uint64_t next_id_ = 1;

  std::thread thread_;
};

} // namespace pycomm
