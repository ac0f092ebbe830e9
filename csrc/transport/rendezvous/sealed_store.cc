#include "transport/rendezvous/sealed_store.h"

#include "base/error.h"
#include "base/log.h"

namespace pycomm {

SealedStore::SealedStore(Store& store, const Secret& secret) : store_(store), seal_(secret) {}

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
      log(LogLevel::Warn, "an entry of the store is ignored: " + error.record().summary);
    }
    return std::nullopt;
  }
}

} // namespace pycomm
