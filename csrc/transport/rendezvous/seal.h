#pragma once

#include <string>
#include <string_view>

#include "base/job_ranks.h"
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

/// For a process without a secret: throws Error(ConfigMismatch) if `value` is a sealed one, which nobody can mistake for another text.
void refuseSealed(const std::string& key, const std::string& value, const JobRanks& job = {});

} // namespace pycomm
