#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

#include "transport/rendezvous/seal.h"
#include "transport/rendezvous/store.h"
#include "transport/secure/secret.h"

namespace pycomm {

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

} // namespace pycomm
