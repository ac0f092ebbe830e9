#include "transport/rendezvous/sealed_store.h"

#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/printable.h"
#include "transport/secure/crypto.h"

namespace pycomm {
namespace {

constexpr std::string_view kSealMark = "pcs1 ";
constexpr size_t kKeyIdChars = 8;
constexpr size_t kMacChars = 2 * sizeof(Digest);
constexpr size_t kSealNbytes = kSealMark.size() + kKeyIdChars + 1 + kMacChars + 1;
constexpr size_t kMaxShownKeyNbytes = 256;

void putSized(std::string& out, std::string_view text) {
  for (int shift = 0; shift < 64; shift += 8) {
    out += static_cast<char>(static_cast<uint64_t>(text.size()) >> shift);
  }
  out += text;
}

std::string takeLastPart(std::string& key) {
  const size_t slash = key.rfind('/');
  std::string last = key.substr(slash + 1); // the whole of it if there is no slash
  key.resize(slash == std::string::npos ? 0 : slash);
  return last;
}

int rankIn(const std::string& text) {
  const bool number = !text.empty() && text.size() < 8 && text.find_first_not_of("0123456789") == std::string::npos;
  return number ? std::stoi(text) : -1;
}

// The rank that writes a key, -1 for no rank: ".../member/RANK", ".../member/all" and ".../member/all/PART" (rank 0), ".../owner/RANK/CLAIM", ".../end/RANK/CLAIM".
int writerOf(std::string key) {
  const std::string last = takeLastPart(key);
  const std::string before = takeLastPart(key);
  const std::string kind = takeLastPart(key);
  if (kind == "owner" || kind == "end") {
    return rankIn(before);
  }
  return last == "all" || before == "all" ? 0 : rankIn(last);
}

Error badSeal(
    ErrorCode code,
    const std::string& key,
    const JobRanks& job,
    const std::string& who_and_what,
    const std::string& hint) {
  ErrorRecord record;
  record.code = code;
  record.peer = job.of(writerOf(key));
  const std::string who = record.peer < 0 ? "another process" : "rank " + std::to_string(record.peer);
  record.summary = who + who_and_what + " (entry " + printable(key, kMaxShownKeyNbytes) + " of the store)";
  record.hint = hint;
  return Error(record);
}

// Of a value with a seal; empty for any other.
std::string keyIdIn(std::string_view value) {
  const bool has_seal =
      value.size() >= kSealNbytes && value.substr(0, kSealMark.size()) == kSealMark && value[kSealNbytes - 1] == '\n';
  return has_seal ? printable(value.substr(kSealMark.size(), kKeyIdChars), kKeyIdChars) : "";
}
} // namespace

Seal::Seal(const Secret& secret, JobRanks job)
    : key_(secret.derive("pycomm 1 store")), key_id_(secret.keyId()), job_(std::move(job)) {}

std::string Seal::macOf(const std::string& key, std::string_view value) const {
  std::string text;
  text.reserve(key.size() + value.size() + 2 * sizeof(uint64_t));
  putSized(text, key);
  putSized(text, value);
  return hexOf(viewOf(hmacSha256(key_.view(), text)));
}

std::string Seal::sealed(const std::string& key, std::string_view value) const {
  return std::string(kSealMark) + key_id_ + " " + macOf(key, value) + "\n" + std::string(value);
}

std::string Seal::opened(const std::string& key, const std::string& text) const {
  const std::string key_id = keyIdIn(text);
  if (key_id.empty()) {
    throw badSeal(
        ErrorCode::ConfigMismatch,
        key,
        job_,
        " has no secret, and this process has one (key id " + key_id_ + ")",
        std::string("give every rank the same secret file; ") + kHowToCopySecret +
            ". If all have it, somebody else writes to torch's store: let only the hosts of the job reach its port (MASTER_PORT)");
  }
  if (key_id != key_id_) {
    throw badSeal(
        ErrorCode::ConfigMismatch,
        key,
        job_,
        " has a different secret (key id " + key_id + ", here " + key_id_ + ")",
        std::string("copy one secret file to every host; ") + kHowToCopySecret +
            ". \"python -m pycomm secret --id\" shows which one a host has");
  }
  const std::string_view value = std::string_view(text).substr(kSealNbytes);
  const std::string_view mac = std::string_view(text).substr(kSealNbytes - 1 - kMacChars, kMacChars);
  if (!equalInConstantTime(macOf(key, value), mac)) {
    throw badSeal(
        ErrorCode::ProtocolViolation,
        key,
        job_,
        "'s record was changed by somebody who does not have the secret",
        "somebody else writes to torch's store: let only the hosts of the job reach its port (MASTER_PORT), and start the job again");
  }
  return std::string(value);
}

void refuseSealed(const std::string& key, const std::string& value, const JobRanks& job) {
  if (const std::string key_id = keyIdIn(value); !key_id.empty()) {
    throw badSeal(
        ErrorCode::ConfigMismatch,
        key,
        job,
        " has a secret (key id " + key_id + "), and this process has none",
        std::string("give every rank the same secret file; ") + kHowToCopySecret);
  }
}

SealedStore::SealedStore(Store& store, const Secret& secret, JobRanks job)
    : store_(store), seal_(secret, std::move(job)) {}

void SealedStore::set(const std::string& key, const std::string& value) {
  store_.set(key, seal_.sealed(key, value));
}

std::string SealedStore::get(const std::string& key, Deadline deadline) {
  return seal_.opened(key, store_.get(key, deadline));
}

bool SealedStore::has(const std::string& key) {
  return store_.has(key);
}

int64_t SealedStore::add(const std::string& key, int64_t amount) {
  return store_.add(key, amount);
}

bool SealedStore::remove(const std::string& key) {
  return store_.remove(key);
}

void SealedStore::setUnsealed(const std::string& key, const std::string& value) {
  store_.setUnsealed(key, value);
}

std::optional<std::string> SealedStore::findUnsealed(const std::string& key) {
  return store_.findUnsealed(key);
}

std::optional<std::string> SealedStore::find(const std::string& key) {
  const std::optional<std::string> value = store_.find(key);
  if (!value) {
    return std::nullopt;
  }
  try {
    return seal_.opened(key, *value);
  } catch (const Error& error) {
    if (error.record().code != ErrorCode::ConfigMismatch && error.record().code != ErrorCode::ProtocolViolation) {
      throw; // not about the value
    }
    if (!warned_.exchange(true)) {
      const int rank = error.record().peer;
      log(LogLevel::Warn,
          "ignored the entry " + printable(key, kMaxShownKeyNbytes) + " of torch's store: its writer" +
              (rank < 0 ? "" : ", rank " + std::to_string(rank) + " by the entry's name,") +
              " has another secret than this process, or none. If the job ends with an error now, that error names the rank; do what "
              "it says. If the job starts, somebody else writes to the store: let only the hosts of the job reach MASTER_PORT");
    }
    return std::nullopt;
  }
}

} // namespace pycomm
