#include "transport/memory/death_watch.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstddef>
#include <ctime>
#include <utility>

#include "base/error.h"
#include "base/native_thread.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010 // Linux 5.1
#endif
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U // Linux 6.3, where an administrator may demand it
#endif
#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449 // Linux 5.16; one number on all machines
#endif

namespace pycomm {
namespace {

constexpr uint32_t kWaiters = 0x80000000U; // FUTEX_WAITERS: without it the kernel marks the word but wakes no waiter
constexpr uint32_t kOwnerDied = 0x40000000U; // FUTEX_OWNER_DIED
constexpr uint32_t kThreadId = 0x3fffffffU; // FUTEX_TID_MASK
constexpr size_t kMaxWaits = 128; // of one futex_waitv
constexpr long kPollMs = 20; // without that call, or with more words than it takes
constexpr int kMaxFailures = 8;

// struct futex_waitv, of Linux 5.16: older headers lack it.
struct WaitEntry {
  uint64_t value = 0;
  uint64_t address = 0;
  uint32_t flags = 0;
  uint32_t reserved = 0;
};
static_assert(sizeof(WaitEntry) == 24, "the kernel's layout");
constexpr uint32_t kWait32Bits = 2; // FUTEX_32
constexpr uint32_t kWaitPrivate = 128; // FUTEX_PRIVATE_FLAG

static_assert(
    sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free,
    "a futex is a plain word");

uint64_t addressOf(const std::atomic<uint32_t>& word) {
  return reinterpret_cast<uint64_t>(&word);
}

} // namespace

DeathWatch::DeathWatch(Died died) : died_(std::move(died)), lent_(kWords, false) {
  static_assert(sizeof(Node) == kStride, "one offset must lead from every node to its word");
  openWords();
  Node* last = &head_.list;
  for (Node& node : nodes_) {
    last->next = &node;
    last = &node;
  }
  last->next = &head_.list;
  head_.futex_offset = reinterpret_cast<std::byte*>(words_) - reinterpret_cast<std::byte*>(nodes_.data());
  std::atomic<int> started{-1};
  try {
    thread_ = startNativeThread("pycomm-watch", [this, &started] { threadMain(started); });
  } catch (...) {
    ::munmap(words_, kNbytes);
    throw;
  }
  int error_number = -1;
  while ((error_number = started.load(std::memory_order_acquire)) < 0) {
    std::this_thread::yield(); // for the microseconds that a thread takes to start
  }
  if (error_number != 0) {
    thread_.join();
    ::munmap(words_, kNbytes);
    throw Error(systemError(ErrorCode::SystemError, "no robust futexes (set_robust_list)", error_number));
  }
}

DeathWatch::~DeathWatch() {
  stop();
  for (const Watched& watched : watched_) {
    ::munmap(watched.page, kNbytes);
  }
  ::munmap(words_, kNbytes);
}

void DeathWatch::openWords() {
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  words_fd_ = UniqueFd::from([&] { return ::memfd_create("pycomm-alive", kFlags | MFD_NOEXEC_SEAL); });
  if (!words_fd_ && errno == EINVAL) {
    words_fd_ = UniqueFd::from([&] { return ::memfd_create("pycomm-alive", kFlags); });
  }
  if (!words_fd_) {
    throw Error(systemError(ErrorCode::SystemError, "no shared memory (memfd_create)", errno));
  }
  // Allocates the pages: if the kernel needed memory for a word while the process dies, the word would stay as it is.
  const int error_number = ::posix_fallocate(words_fd_.get(), 0, kNbytes);
  if (error_number != 0) {
    throw Error(systemError(ErrorCode::SystemError, "no shared memory (fallocate)", error_number));
  }
  void* mapped = ::mmap(nullptr, kNbytes, PROT_READ | PROT_WRITE, MAP_SHARED, words_fd_.get(), 0);
  if (mapped == MAP_FAILED) {
    throw Error(systemError(ErrorCode::SystemError, "no shared memory (mmap)", errno));
  }
  words_ = static_cast<std::byte*>(mapped);
  // A child of fork() is not the watched process: it neither keeps nor touches the words.
  (void)::madvise(words_, kNbytes, MADV_DONTFORK);
  // A process that gets the descriptor can only read, and the file never becomes shorter.
  constexpr int kSize = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  if (::fcntl(words_fd_.get(), F_ADD_SEALS, kSize | F_SEAL_FUTURE_WRITE) != 0 &&
      ::fcntl(words_fd_.get(), F_ADD_SEALS, kSize) != 0) {
    const int sealing = errno;
    ::munmap(words_, kNbytes);
    throw Error(systemError(ErrorCode::SystemError, "shared memory cannot be sealed", sealing));
  }
}

std::atomic<uint32_t>& DeathWatch::word(uint32_t index) noexcept {
  return *reinterpret_cast<std::atomic<uint32_t>*>(words_ + index * kStride);
}

std::optional<uint32_t> DeathWatch::lend() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stopping_.load()) {
    return std::nullopt;
  }
  const auto free = std::find(lent_.begin(), lent_.end(), false);
  if (free == lent_.end()) {
    return std::nullopt;
  }
  *free = true;
  const auto index = static_cast<uint32_t>(free - lent_.begin());
  word(index).store(own_id_ | kWaiters, std::memory_order_release);
  return index;
}

void DeathWatch::takeBack(uint32_t index) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  lent_[index] = false;
  word(index).store(0, std::memory_order_release);
}

uint64_t DeathWatch::watch(const UniqueFd& words, uint32_t index) {
  struct stat status{};
  const int seals = ::fcntl(words.get(), F_GET_SEALS);
  if (index >= kWords || ::fstat(words.get(), &status) != 0 || status.st_size < static_cast<off_t>(kNbytes) ||
      seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    throw Error(ErrorCode::ProtocolViolation, "a process of this host passed something else than its words");
  }
  void* page = ::mmap(nullptr, kNbytes, PROT_READ, MAP_SHARED, words.get(), 0);
  if (page == MAP_FAILED) {
    throw Error(systemError(ErrorCode::SystemError, "shared memory cannot be mapped", errno));
  }
  (void)::madvise(page, kNbytes, MADV_DONTFORK);
  Watched watched;
  watched.page = page;
  watched.word = reinterpret_cast<const std::atomic<uint32_t>*>(static_cast<std::byte*>(page) + index * kStride);
  watched.alive = watched.word->load(std::memory_order_acquire);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    watched.id = next_id_++;
    watched_.push_back(watched);
  }
  poke();
  return watched.id;
}

void DeathWatch::unwatch(uint64_t watch) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found =
      std::find_if(watched_.begin(), watched_.end(), [&](const Watched& entry) { return entry.id == watch; });
  if (found != watched_.end()) {
    // The thread may be about to sleep on this address. The kernel compares first: it finds no memory there, or another
    // value, and the thread checks again.
    ::munmap(found->page, kNbytes);
    watched_.erase(found);
  }
}

void DeathWatch::poke() noexcept {
  changes_.fetch_add(1, std::memory_order_seq_cst);
  ::syscall(SYS_futex, &changes_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void DeathWatch::stop() noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_.exchange(true)) {
      return;
    }
  }
  poke();
  thread_.join();
}

// Reports the changes since the last call, one at a time: during a report this thread allocates nothing and holds no
// lock.
void DeathWatch::look() noexcept {
  for (;;) {
    Watched ended;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = std::find_if(watched_.begin(), watched_.end(), [](const Watched& entry) {
        return entry.word->load(std::memory_order_acquire) != entry.alive || (entry.alive & kThreadId) == 0;
      });
      if (found == watched_.end()) {
        return;
      }
      ended = *found;
      ended.alive = found->word->load(std::memory_order_acquire);
      ::munmap(ended.page, kNbytes);
      watched_.erase(found);
    }
    if ((ended.alive & kOwnerDied) != 0) {
      died_(ended.id);
    } // else it left in order, or lent the word to another
  }
}

void DeathWatch::sleep(uint32_t seen) noexcept {
  std::array<WaitEntry, kMaxWaits> waits;
  waits[0] = WaitEntry{seen, addressOf(changes_), kWait32Bits | kWaitPrivate, 0};
  uint32_t count = 1;
  bool all = true;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Watched& watched : watched_) {
      if (count == kMaxWaits || !wait_many_) {
        all = false;
        break;
      }
      waits[count++] = WaitEntry{watched.alive, addressOf(*watched.word), kWait32Bits, 0};
    }
  }
  if (!wait_many_) {
    const timespec pause{0, kPollMs * 1000000};
    ::syscall(SYS_futex, &changes_, FUTEX_WAIT_PRIVATE, seen, all ? nullptr : &pause, nullptr, 0);
    return;
  }
  timespec until{};
  ::clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_nsec += kPollMs * 1000000;
  until.tv_sec += until.tv_nsec / 1000000000;
  until.tv_nsec %= 1000000000;
  const long woken =
      ::syscall(SYS_futex_waitv, waits.data(), count, 0U, all ? nullptr : &until, static_cast<int>(CLOCK_MONOTONIC));
  if (woken >= 0 || errno == EAGAIN || errno == EINTR || errno == ETIMEDOUT) {
    failures_ = 0;
  } else if (errno == ENOSYS || errno == EPERM || ++failures_ >= kMaxFailures) {
    wait_many_ = false; // an older kernel, or a sandbox that does not know newer system calls
  } // else EFAULT: see unwatch()
}

void DeathWatch::threadMain(std::atomic<int>& started) noexcept {
  own_id_ = static_cast<uint32_t>(::syscall(SYS_gettid));
  void* glibcs_head = nullptr;
  size_t glibcs_nbytes = 0;
  if (::syscall(SYS_get_robust_list, 0, &glibcs_head, &glibcs_nbytes) != 0 ||
      ::syscall(SYS_set_robust_list, &head_, sizeof head_) != 0) {
    started.store(errno, std::memory_order_release);
    return;
  }
  started.store(0, std::memory_order_release); // the constructor goes on: `started` may be gone
  while (!stopping_.load()) {
    const uint32_t seen = changes_.load(std::memory_order_seq_cst);
    look();
    if (!stopping_.load()) {
      sleep(seen);
    }
  }
  // The end of this thread alone would mark the words, too: so this thread first gives up all of them.
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (uint32_t index = 0; index < kWords; ++index) {
      word(index).store(0, std::memory_order_release);
    }
  }
  ::syscall(SYS_set_robust_list, glibcs_head, glibcs_nbytes);
}

} // namespace pycomm
