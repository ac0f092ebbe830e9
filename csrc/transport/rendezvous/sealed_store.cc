#include "transport/rendezvous/sealed_store.h"

#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/printable.h"

namespace pycomm {
namespace {

constexpr size_t kMaxLoggedKeyNbytes = 256;

} // namespace

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
          "ignored the entry " + printable(key, kMaxLoggedKeyNbytes) + " of torch's store: its writer" +
              (rank < 0 ? "" : ", rank " + std::to_string(rank) + " by the entry's name,") +
              " has another secret than this process, or none. If the job ends with an error now, that error names the rank; do what "
              "it says. If the job starts, somebody else writes to the store: let only the hosts of the job reach MASTER_PORT");
    }
    return std::nullopt;
  }
}

} // namespace pycomm
