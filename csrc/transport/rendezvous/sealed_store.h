#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/job_ranks.h"
#include "transport/rendezvous/store.h"
#include "transport/secure/secret.h"

namespace pycomm {

/// Texts that only who has the secret can make or change. They can be read by anybody.
///
///   pcs1 <key id> <HMAC-SHA-256 of the whole key and the value, in hex>\n<value>
///
/// The key is part of the seal: a text does not open under another key. Any thread.
class Seal {
 public:
  /// `job`: what errors call the ranks that write the keys.
  explicit Seal(const Secret& secret, JobRanks job = {});

  [[nodiscard]] std::string sealed(const std::string& key, std::string_view value) const;
  /// The value. Throws an Error that names the key: ConfigMismatch if the text has no seal or another secret's, ProtocolViolation if it was
  /// changed by somebody without the secret.
  [[nodiscard]] std::string opened(const std::string& key, const std::string& text) const;

 private:
  [[nodiscard]] std::string macOf(const std::string& key, std::string_view value) const;

  Key key_;
  std::string key_id_;
  JobRanks job_;
};

/// A Store in which every value carries a Seal.
///
/// The seal holds the key, so a value cannot be moved to another rank, round, generation or group. An older value of the same key
/// can be put back; StoreRound sees to it that this changes nothing. Counters have no seal. get() throws what Seal::opened() throws.
class SealedStore final : public Store {
 public:
  /// `store` outlives this.
  SealedStore(Store& store, const Secret& secret, JobRanks job = {});

  void set(const std::string& key, const std::string& value) override;
  [[nodiscard]] std::string get(const std::string& key, Deadline deadline) override;
  [[nodiscard]] bool has(const std::string& key) override;
  [[nodiscard]] int64_t add(const std::string& key, int64_t amount) override;
  bool remove(const std::string& key) override;
  [[nodiscard]] bool sealed() const noexcept override {
    return true;
  }
  [[nodiscard]] std::optional<std::string> find(const std::string& key) override;
  void setUnsealed(const std::string& key, const std::string& value) override;
  [[nodiscard]] std::optional<std::string> findUnsealed(const std::string& key) override;

 private:
  Store& store_;
  const Seal seal_;
  std::atomic<bool> warned_{false};
};

/// For a process without a secret: throws Error(ConfigMismatch) if `value` is a sealed one, which nobody can mistake for another text.
void refuseSealed(const std::string& key, const std::string& value, const JobRanks& job = {});

} // namespace pycomm
