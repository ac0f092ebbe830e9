#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "transport/rendezvous/store.h"
#include "transport/secure/secret.h"

namespace pycomm {

/// A Store in which every value carries a seal: only who has the secret can make or change one. The values can be read by anybody.
///
///   pcs1 <key id> <HMAC-SHA-256 of the whole key and the value, in hex>\n<value>
///
/// The key is part of the seal, so a value cannot be moved to another rank, round, generation or group. An older value of the same key
/// can be put back; StoreRound sees to it that this changes nothing. Counters have no seal.
///
/// A badly sealed value is an Error that names the key: ConfigMismatch if it has no seal or another secret's, ProtocolViolation if it was
/// changed by somebody without the key.
class SealedStore final : public Store {
 public:
  /// `store` outlives this.
  SealedStore(Store& store, const Secret& secret);

  void set(const std::string& key, const std::string& value) override;
  [[nodiscard]] std::string get(const std::string& key, Deadline deadline) override;
  [[nodiscard]] bool has(const std::string& key) override;
  [[nodiscard]] int64_t add(const std::string& key, int64_t amount) override;
  [[nodiscard]] bool sealed() const noexcept override {
    return true;
  }
  [[nodiscard]] std::optional<std::string> find(const std::string& key) override;

 private:
  [[nodiscard]] std::string macOf(const std::string& key, std::string_view value) const;
  [[nodiscard]] std::string opened(const std::string& key, const std::string& sealed) const;

  Store& store_;
  Key key_;
  std::string key_id_;
  std::atomic<bool> warned_{false};
};

/// For a process without a secret: throws Error(ConfigMismatch) if `value` is a sealed one, which nobody can mistake for another text.
void refuseSealed(const std::string& key, const std::string& value);

} // namespace pycomm
