#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/abort_token.h"
#include "base/deadline.h"
#include "base/error.h"

namespace pycomm {

/// The key/value store that ranks use for the rendezvous. The c10d layer adapts torch's c10d::Store to it; tests use a
/// map in memory.
/// Every call may block; failures are Error(StoreLost) or, past the deadline, Error(RendezvousTimeout).
class Store {
 public:
  virtual ~Store() = default;

  virtual void set(const std::string& key, const std::string& value) = 0;

  /// Waits for `key` to exist, until the deadline.
  [[nodiscard]] virtual std::string get(const std::string& key, Deadline deadline) = 0;

  /// True if `key` exists now. Does not wait.
  [[nodiscard]] virtual bool has(const std::string& key) = 0;

  /// Adds to a counter that starts at 0 and returns the new value, atomically.
  [[nodiscard]] virtual int64_t add(const std::string& key, int64_t amount) = 0;

  /// Deletes a value or a counter. False if there was none, or if this store cannot delete.
  virtual bool remove(const std::string& /*key*/) {
    return false;
  }

  /// Every value was written by a process that has the secret of this one, or get() throws (SealedStore). Counters are not: anybody
  /// may have added to one.
  [[nodiscard]] virtual bool sealed() const noexcept {
    return false;
  }
  /// The value of a key that anybody may have written, if there is one now. A sealed store returns only what a holder of the secret
  /// wrote, and logs what it passes over.
  [[nodiscard]] virtual std::optional<std::string> find(const std::string& key) {
    // Its writer may delete it between the two calls, and then get() waits in vain. A store that is only slow gets more time.
    for (int patience_ms = kLongPauseMs; has(key); patience_ms *= 2) {
      try {
        return get(key, Deadline::after(patience_ms));
      } catch (const Error& error) {
        if (error.record().code != ErrorCode::RendezvousTimeout || 2 * patience_ms > kSureToComeMs) {
          throw;
        }
      }
    }
    return std::nullopt;
  }
  /// set() and find() without a seal, in a sealed store too: anybody may have written what is found (notices.h).
  virtual void setUnsealed(const std::string& key, const std::string& value) {
    set(key, value);
  }
  [[nodiscard]] virtual std::optional<std::string> findUnsealed(const std::string& key) {
    return find(key);
  }
};

} // namespace pycomm
