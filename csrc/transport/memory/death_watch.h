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

/// Reports within about a millisecond that another process of this host has ended, independent of how much memory it
/// held.
///
/// The kernel frees a killed process's memory before it closes its sockets: with 4 GB resident that takes some 400 ms,
/// and a pidfd is as late. Robust futexes are settled before the memory is freed. Each thread may register a list of
/// words in shared memory with the kernel. When the thread ends, the kernel marks those words that still hold its
/// thread id and wakes their waiters (man 2 set_robust_list).
///
/// One thread of this class does both halves. Its words, in a sealed memfd without a name, show others that this
/// process is alive; and it sleeps on the words that other processes lent to this one.
///
/// It does not use pthread robust mutexes, although they are the documented user of the list: a thread can wait for
/// only one mutex at a time, and the layout of a mutex's word is private to glibc. glibc registers a list for every
/// thread. This thread replaces it by its own, which is safe because it locks no robust pthread mutex.
///
/// There is one word per watcher, since the kernel wakes one waiter per word, and that waiter may be stopped.
class DeathWatch {
 public:
  /// Called on the death watch's own thread, once per watch: must not block, throw, or call back.
  using Died = std::function<void(uint64_t watch)>;

  static constexpr uint32_t kWords = 512;
  static constexpr size_t kStride = 8; ///< bytes from word to word, as from node to node of the robust list
  static constexpr size_t kNbytes = kWords * kStride;

  /// Throws Error(SystemError | TooManyFiles) if the kernel or a sandbox lacks something.
  explicit DeathWatch(Died died);
  /// Like stop(). Must not run in a child of fork(): keep the object there.
  ~DeathWatch();
  DeathWatch(const DeathWatch&) = delete;
  DeathWatch& operator=(const DeathWatch&) = delete;

  /// The memfd with the words, to be passed to another process together with a number from lend().
  [[nodiscard]] int wordsFd() const noexcept {
    return words_fd_.get();
  }
  /// Lends a word that shows from now on that this process is alive; nullopt if all are lent.
  [[nodiscard]] std::optional<uint32_t> lend();
  void takeBack(uint32_t word) noexcept;

  /// Watches a word that another process has lent. Throws Error(ProtocolViolation) if the descriptor is not a valid
  /// words memfd: reading it must never raise a signal.
  [[nodiscard]] uint64_t watch(const UniqueFd& words, uint32_t word);
  /// Never waits; a call of `died` may still be running.
  void unwatch(uint64_t watch) noexcept;

  /// An orderly end: clears the words before the thread ends. Joins the thread. Idempotent.
  void stop() noexcept;

 private:
  /// The kernel's struct robust_list_head and robust_list (linux/futex.h), which are not available in C++ everywhere.
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
    uint32_t alive = 0; ///< the word's value while its owner lives
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
      nodes_; ///< one per word, linked once and never changed: a word that is not lent holds no thread's id
  Head head_;
  uint32_t own_id_ = 0; ///< the thread's id

  std::atomic<uint32_t> changes_{0}; ///< a futex: wakes the thread after a change of watched_ or stopping_
  std::atomic<bool> stopping_{false};
  bool wait_many_ = true; ///< used by the thread only: the kernel has futex_waitv
  int failures_ = 0; ///< used by the thread only: consecutive failures of futex_waitv

  std::mutex mutex_; ///< guards the members below
  std::vector<Watched> watched_;
  std::vector<bool> lent_;
  uint64_t next_id_ = 1;

  std::thread thread_;
};

} // namespace pycomm
