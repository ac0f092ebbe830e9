#include "transport/secure/secret.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/unique_fd.h"
#include "transport/random_bytes.h"

namespace pycomm {
namespace {

constexpr std::string_view kSecretMark = "pycomm-secret-1:";
constexpr std::string_view kAlphabet =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"; // RFC 4648, 5
constexpr size_t kKeyChars = 43;
constexpr size_t kCheckChars = 4;
constexpr size_t kSecretChars = kSecretMark.size() + kKeyChars + kCheckChars;
constexpr size_t kMaxFileNbytes = 4096;
constexpr size_t kKeyIdNbytes = 4;
constexpr const char* kFsGroup = "\"fsGroup: 1000\" under the pod's \"securityContext:\"";

/// A text that is wiped at the end.
struct Wiped {
  std::string text;
  ~Wiped() {
    wipe(text);
  }
};

void toBase64(std::string& out, std::string_view bytes) {
  uint32_t bits = 0;
  int count = 0;
  for (const char c : bytes) {
    bits = (bits << 8) | static_cast<unsigned char>(c);
    for (count += 8; count >= 6; count -= 6) {
      out += kAlphabet[(bits >> (count - 6)) & 63];
    }
  }
  if (count > 0) {
    out += kAlphabet[(bits << (6 - count)) & 63];
  }
}

bool fromBase64(std::string_view text, Key& key) {
  uint32_t bits = 0;
  int count = 0;
  size_t done = 0;
  for (const char c : text) {
    const size_t value = kAlphabet.find(c);
    if (value == std::string_view::npos) {
      return false;
    }
    bits = (bits << 6) | static_cast<uint32_t>(value);
    count += 6;
    if (count >= 8) {
      count -= 8;
      key.bytes()[done++] = static_cast<unsigned char>(bits >> count);
    }
  }
  return (bits & ((1U << count) - 1)) == 0; // one text for one key
}

// Of the 43 characters: the check is of what was copied.
std::string checkOf(std::string_view key_chars) {
  std::string check;
  toBase64(check, viewOf(sha256(key_chars)).substr(0, 3));
  return check;
}

Wiped textOf(const Key& key) {
  Wiped text;
  text.text.reserve(kSecretChars + 1); // so that no copy is left behind in memory given back
  text.text += kSecretMark;
  toBase64(text.text, key.view());
  text.text += checkOf(std::string_view(text.text).substr(kSecretMark.size()));
  return text;
}

std::string_view stripped(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n";
  const size_t first = text.find_first_not_of(kSpace);
  return first == std::string_view::npos ? "" : text.substr(first, text.find_last_not_of(kSpace) - first + 1);
}

// The copy comes first: a second secret would lock this host out of the job.
std::string copyOrGenerate() {
  return std::string(kHowToCopySecret) + ". Only if no host has one: python -m pycomm secret --generate";
}

std::string copyAgain() {
  return std::string("copy the file again; ") + kHowToCopySecret;
}

Error refused(const std::string& where, const std::string& why, const std::string& hint = copyOrGenerate()) {
  return {ErrorCode::InvalidArgument, where + " " + why, hint};
}

std::string octal(mode_t mode) {
  std::string out = "0";
  for (int shift = 6; shift >= 0; shift -= 3) {
    out += static_cast<char>('0' + ((mode >> shift) & 7));
  }
  return out;
}

Error notOpened(const std::string& path, int error_number) {
  std::string hint = copyOrGenerate();
  if (error_number == EACCES && ::geteuid() == 0) {
    hint = "NFS does not let root read a user's file (root_squash): copy it to a local disk";
  } else if (error_number == EACCES) {
    hint = "see ls -l " + path +
        ": it must belong to the user of the job and have mode 0600, or to root and have mode 0640 and a group of that user; in Kubernetes: " +
        kFsGroup;
  }
  ErrorRecord record =
      systemError(ErrorCode::InvalidArgument, "the secret file " + path + " cannot be read", error_number);
  record.hint = record.hint.empty() ? hint : record.hint;
  return Error(record);
}

} // namespace

Secret::Secret(Key key) : key_(std::move(key)) {
  key_id_ = hexOf(viewOf(hmacSha256(key_.view(), "pycomm key id")).substr(0, kKeyIdNbytes));
}

Secret Secret::generate() {
  Key key;
  fillRandom(key.bytes(), Key::kNbytes);
  return Secret(std::move(key));
}

Secret Secret::parse(std::string_view text, const std::string& where) {
  const std::string_view line = stripped(text);
  const std::string not_one = "is not a pycomm secret";
  const auto counted = [&] {
    return std::to_string(line.size()) + " of " + std::to_string(kSecretChars) + " characters";
  };
  if (line.empty()) {
    throw refused(where, "is empty");
  }
  if (line.find('\n') != std::string_view::npos) {
    throw refused(where, not_one + " (it has more than one line)", "put one secret into one file");
  }
  if (line.substr(0, kSecretMark.size()) != kSecretMark.substr(0, line.size())) {
    throw refused(where, not_one + " (line 1 does not begin with \"" + std::string(kSecretMark) + "\")");
  }
  if (line.size() != kSecretChars) {
    throw refused(
        where,
        not_one + " (line 1, " + counted() +
            (line.size() < kSecretChars ? ": cut off in copying?)" : ": something was added)"),
        copyAgain());
  }
  Key key;
  const std::string_view key_chars = line.substr(kSecretMark.size(), kKeyChars);
  if (!fromBase64(key_chars, key) ||
      !equalInConstantTime(checkOf(key_chars), line.substr(kSecretMark.size() + kKeyChars))) {
    throw refused(
        where,
        not_one + " (line 1, " + counted() + ", but the last four, which check the others, do not fit)",
        copyAgain());
  }
  return Secret(std::move(key));
}

NotPrivate whyNotPrivate(const std::string& path, const FileFacts& facts, uid_t user) {
  const std::string mode = "has mode " + octal(facts.mode) + ": other users ";
  if (facts.owner != user && facts.owner != 0) {
    return {
        "belongs to user " + std::to_string(facts.owner) + ", and this process is user " + std::to_string(user),
        "as root: chown " + std::to_string(user) + " " + path +
            "; in Docker: start the container with --user $(id -u):$(id -g)"};
  }
  if (facts.owner == 0) {
    if ((facts.mode & (S_IWGRP | S_IWOTH)) != 0) {
      return {mode + "may change it", "chmod 640 " + path};
    }
    if ((facts.mode & (S_IXGRP | S_IRWXO)) != 0 && facts.file_system != TMPFS_MAGIC) {
      return {
          mode + "may read it",
          "chmod 640 " + path + "; in Kubernetes: \"defaultMode: 0440\" under the volume's \"secret:\", and " +
              kFsGroup};
    }
    return {};
  }
  if ((facts.mode & (S_IRWXG | S_IRWXO)) != 0) {
    return {
        mode + "may read it",
        "chmod 600 " + path + "; a file system without Unix modes (FAT, a Windows drive) cannot hold a secret"};
  }
  return {};
}

Secret Secret::readFile(const std::string& path) {
  const std::string where = "the secret file " + path;
  // O_NONBLOCK: a FIFO must not block. Links are followed: Kubernetes mounts files as links.
  const UniqueFd fd =
      UniqueFd::from([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY); });
  struct stat status{};
  struct statfs system{};
  if (!fd || ::fstat(fd.get(), &status) != 0 || ::fstatfs(fd.get(), &system) != 0) {
    throw notOpened(path, errno);
  }
  if (!S_ISREG(status.st_mode)) {
    throw refused(where, "is not a regular file");
  }
  const FileFacts facts{status.st_uid, status.st_mode, static_cast<uint64_t>(system.f_type)};
  if (const NotPrivate found = whyNotPrivate(path, facts, ::geteuid()); !found.why.empty()) {
    throw refused(where, found.why, found.hint);
  }
  std::array<char, kMaxFileNbytes + 1> bytes{};
  size_t size = 0;
  for (ssize_t got = 1; got != 0 && size < bytes.size();) {
    got = ::read(fd.get(), bytes.data() + size, bytes.size() - size);
    if (got < 0 && errno != EINTR) {
      throw notOpened(path, errno);
    }
    size += static_cast<size_t>(std::max<ssize_t>(got, 0));
  }
  std::optional<Secret> secret;
  try {
    if (size > kMaxFileNbytes) {
      throw refused(where, "is not a pycomm secret (it has more than 4096 bytes)");
    }
    secret.emplace(parse({bytes.data(), size}, where));
  } catch (const Error&) {
    ::explicit_bzero(bytes.data(), bytes.size());
    throw;
  }
  ::explicit_bzero(bytes.data(), bytes.size());
  if (facts.file_system == NFS_SUPER_MAGIC) {
    static std::atomic<bool> warned{false}; // each group reads the file
    if (!warned.exchange(true)) {
      log(LogLevel::Warn,
          where +
              " is on NFS: unless Kerberos protects it, everyone who sees the network between this host and the file server can read it. "
              "Copy it to a local disk of each host (scp -p), and set PYCOMM_SECRET_FILE");
    }
  } else if ((facts.mode & S_IROTH) != 0) {
    static std::atomic<bool> warned{false};
    if (!warned.exchange(true)) {
      log(LogLevel::Warn,
          where +
              " may be read by every user of this container, or of this host if there is none: chmod 640, or in Kubernetes "
              "\"defaultMode: 0440\", and if the container is not root " +
              kFsGroup);
    }
  }
  return *std::move(secret);
}

void Secret::writeFile(const std::string& path) const {
  const UniqueFd fd = UniqueFd::from(
      [&] { return ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, S_IRUSR | S_IWUSR); });
  if (!fd && errno == EEXIST) {
    throw refused(
        "the secret file " + path,
        "exists already, and is left as it is",
        std::string(kHowToCopySecret) + ". For a new secret, first delete the old one on every host");
  }
  Wiped line = textOf(key_);
  line.text += '\n';
  const auto wanted = static_cast<ssize_t>(line.text.size());
  const ssize_t written = fd ? ::write(fd.get(), line.text.data(), line.text.size()) : -1;
  if (written != wanted || ::fsync(fd.get()) != 0) {
    const int error_number = written >= 0 && written < wanted ? ENOSPC : errno; // a short write does not set errno
    if (fd) {
      (void)::unlink(path.c_str());
    }
    throw Error(systemError(ErrorCode::SystemError, "the secret file " + path + " cannot be written", error_number));
  }
}

} // namespace pycomm
