#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <stdexcept>

namespace fake_cuda {

/// An address that a kernel or a copy may not use, and why.
struct IllegalAddress : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The device's memory, and pinned memory of the host.
///
/// Device memory is mapped twice: where pointers to it point, no thread may read or write (a fault that says so); kernels and copies
/// find the same bytes elsewhere. Addresses are never used again, and what lies between two allocations belongs to none.
class Memory {
 public:
  static Memory& the(); ///< lives as long as the process

  [[nodiscard]] void* allocate(size_t nbytes, int device);
  /// From here on nothing may use it. Its bytes stay until poison(), for what is on a stream already.
  void release(void* ptr);
  void poison(void* ptr);
  void forget(void* ptr); ///< after the last poison()
  [[nodiscard]] void* allocatePinned(size_t nbytes);
  /// False if it is none.
  [[nodiscard]] bool freePinned(void* ptr);

  /// Where kernels and copies find these bytes. Throws IllegalAddress unless all of them are in one living allocation: of the device,
  /// or, with `pinned_too`, of pinned memory.
  [[nodiscard]] std::byte* inKernel(const void* ptr, size_t nbytes, bool pinned_too);
  /// Pointers as programs have them, of bytes as kernels find them.
  [[nodiscard]] void* fromKernel(const void* bytes) const;
  [[nodiscard]] bool isInKernel(const void* bytes) const;
  /// The beginning of the living allocation that holds it, or null.
  [[nodiscard]] void* beginOf(const void* ptr);

 private:
  Memory();

  std::byte* outside_ = nullptr; ///< the mapping that nobody may touch
  std::byte* inside_ = nullptr;
  std::mutex mutex_; ///< guards the rest
  size_t used_ = 0;
  std::map<std::byte*, size_t> living_;
  std::map<std::byte*, size_t> released_; ///< and not forgotten
  std::map<std::byte*, size_t> pinned_;
};

} // namespace fake_cuda
