#include "fake_cudart/memory.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

namespace fake_cuda {
namespace {

constexpr size_t kReserve = size_t{32} << 30; // of addresses; memory is taken when it is written to
constexpr size_t kAlign = 512; // as cudaMalloc; torch views need 16
constexpr size_t kGap = 512; // between allocations, and nobody's

std::byte* g_outside = nullptr;
struct sigaction g_before;

void onFault(int number, siginfo_t* info, void* /*context*/) {
  const auto* const at = static_cast<const std::byte*>(info->si_addr);
  if (at >= g_outside && at < g_outside + kReserve) {
    constexpr char kText[] = "fake CUDA: the host has touched device memory; only kernels and copies may\n";
    static_cast<void>(!write(STDERR_FILENO, kText, sizeof(kText) - 1));
  }
  sigaction(number, &g_before, nullptr); // the same instruction runs again, and the former handler reports it
}

std::string addressText(const void* ptr, size_t nbytes) {
  char text[64];
  std::snprintf(text, sizeof(text), "%p of %zu bytes", ptr, nbytes);
  return text;
}

} // namespace

Memory& Memory::the() {
  static auto* const made = new Memory();
  return *made;
}

Memory::Memory() {
  const int file = memfd_create("fake_cuda", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(kReserve)) != 0) {
    std::perror("fake CUDA: memory");
    std::abort();
  }
  const auto map = [&](int protection) {
    void* const at = mmap(nullptr, kReserve, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (at == MAP_FAILED) {
      std::perror("fake CUDA: memory");
      std::abort();
    }
    madvise(at, kReserve, MADV_DONTDUMP);
    return static_cast<std::byte*>(at);
  };
  outside_ = g_outside = map(PROT_NONE);
  inside_ = map(PROT_READ | PROT_WRITE);
  close(file);
  struct sigaction action = {};
  action.sa_sigaction = onFault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &g_before);
}

void* Memory::allocate(size_t nbytes, int /*device*/) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const size_t room = (nbytes + kAlign - 1) / kAlign * kAlign + kGap;
  if (used_ + room > kReserve) {
    throw std::bad_alloc();
  }
  std::byte* const at = outside_ + used_;
  used_ += room;
  living_.emplace(at, nbytes);
  return at;
}

void Memory::release(void* ptr) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = living_.find(static_cast<std::byte*>(ptr));
  if (found == living_.end()) {
    throw IllegalAddress("it frees " + addressText(ptr, 0) + ", which was not allocated, or was freed before");
  }
  released_.emplace(found->first, found->second);
  living_.erase(found);
}

void Memory::poison(void* ptr) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = released_.find(static_cast<std::byte*>(ptr));
  std::byte* const inside = inside_ + (found->first - outside_);
  constexpr size_t kPage = 4096;
  const size_t nbytes = found->second;
  if (nbytes > size_t{4} << 20) { // its pages go back, but for the ends: what reads it finds zeros there
    std::memset(inside, 0xff, kPage);
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(inside) + 2 * kPage - 1) / kPage * kPage;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(inside) + nbytes) / kPage * kPage;
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_REMOVE);
  } else {
    std::memset(inside, 0xff, nbytes); // NaN, if read as a float
  }
}

void Memory::forget(void* ptr) {
  const std::lock_guard<std::mutex> lock(mutex_);
  released_.erase(static_cast<std::byte*>(ptr));
}

void* Memory::allocatePinned(size_t nbytes) {
  void* const ptr = std::malloc(nbytes == 0 ? 1 : nbytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  pinned_.emplace(static_cast<std::byte*>(ptr), nbytes);
  return ptr;
}

bool Memory::freePinned(void* ptr) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (pinned_.erase(static_cast<std::byte*>(ptr)) == 0) {
      return false;
    }
  }
  std::free(ptr);
  return true;
}

std::byte* Memory::inKernel(const void* ptr, size_t nbytes, bool pinned_too) {
  auto* const at = static_cast<std::byte*>(const_cast<void*>(ptr));
  const auto holds = [&](const std::map<std::byte*, size_t>& blocks) {
    auto found = blocks.upper_bound(at);
    return found != blocks.begin() && (--found, at + nbytes <= found->first + found->second);
  };
  const std::lock_guard<std::mutex> lock(mutex_);
  if (holds(living_)) {
    return inside_ + (at - outside_);
  }
  if (pinned_too && holds(pinned_)) {
    return at;
  }
  const bool was = holds(released_);
  throw IllegalAddress(
      addressText(ptr, nbytes) + " is " +
      (was ? "device memory that has been freed" : "not memory that this device gave out"));
}

void* Memory::fromKernel(const void* bytes) const {
  return outside_ + (static_cast<const std::byte*>(bytes) - inside_);
}

bool Memory::isInKernel(const void* bytes) const {
  const auto* const at = static_cast<const std::byte*>(bytes);
  return at >= inside_ && at < inside_ + kReserve;
}

void* Memory::beginOf(const void* ptr) {
  auto* const at = static_cast<std::byte*>(const_cast<void*>(ptr));
  const std::lock_guard<std::mutex> lock(mutex_);
  auto found = living_.upper_bound(at);
  if (found == living_.begin() || at >= (--found)->first + found->second + 1) {
    return nullptr;
  }
  return found->first;
}

} // namespace fake_cuda
