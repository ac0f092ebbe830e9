#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "transport/secure/crypto.h"

namespace pycomm {

/// What the processes of a job know and nobody else: 32 random bytes. It has no text form but the file's, and nothing prints it.
///
///   pycomm-secret-1:<32 bytes in base64url, 43 characters><4 characters of their SHA-256>
///
/// A password would not do: an attacker who has seen one handshake or one sealed record could try words against it offline.
class Secret {
 public:
  [[nodiscard]] static Secret generate();
  /// White space around `text` does not count. Throws Error(InvalidArgument) with `where`, what is wrong, and nothing of the text.
  [[nodiscard]] static Secret parse(std::string_view text, const std::string& where);
  /// Throws Error(InvalidArgument): the file is missing, is not a regular one of at most 4 KiB, others may read it (see
  /// whyNotPrivate()), or parse() refuses it. The first time, logs a warning if it is on NFS.
  [[nodiscard]] static Secret readFile(const std::string& path);

  /// Writes a new file that only this user may read. Throws Error(InvalidArgument) if there is one.
  void writeFile(const std::string& path) const;

  /// Public: 8 hexadecimal digits that tell one secret from another, for records and errors.
  [[nodiscard]] const std::string& keyId() const noexcept {
    return key_id_;
  }
  /// A key for one purpose. It tells nothing about the secret or about another purpose's key.
  [[nodiscard]] Key derive(std::string_view purpose) const {
    return hkdfSha256(key_.view(), "", purpose);
  }

 private:
  explicit Secret(Key key);

  Key key_;
  std::string key_id_;
};

/// What an error says to try if a host lacks the secret.
inline constexpr const char* kHowToCopySecret =
    "on a host that has the file, run for each HOST that needs it: ssh HOST mkdir -p -m 700 .config/pycomm && "
    "scp -p ~/.config/pycomm/secret HOST:.config/pycomm/ (if PYCOMM_SECRET_FILE names another file, copy that one). "
    "Do not generate a second one";

/// What fstat() and fstatfs() say of a file.
struct FileFacts {
  uid_t owner = 0;
  mode_t mode = 0;
  uint64_t file_system = 0; ///< f_type
};

struct NotPrivate {
  std::string why; ///< empty if the file is private enough
  std::string hint;
};

/// The rule of libpq for its private keys: a file of `user` has mode 0600 or less; one of root may also be readable by its group. On
/// tmpfs anybody may read root's file: Kubernetes mounts a Secret so.
[[nodiscard]] NotPrivate whyNotPrivate(const std::string& path, const FileFacts& facts, uid_t user);

} // namespace pycomm
