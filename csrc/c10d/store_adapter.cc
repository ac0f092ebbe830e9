#include "c10d/store_adapter.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <fcntl.h>

#include <cerrno>
#include <chrono>
#include <limits>
#include <utility>

#include "base/error.h"
#include "base/unique_fd.h"
#include "base/wait_point.h"

namespace pycomm {
namespace {

// A store of files opens one at every call, and one over TCP at the first; both put errno's text into what they throw.
bool lacksFiles(const std::string& text) {
  if (text.find("Too many open files") != std::string::npos) {
    return true;
  }
  const UniqueFd probe = UniqueFd::from([] { return ::open("/dev/null", O_RDONLY | O_CLOEXEC); });
  return !probe && errno == EMFILE;
}

// torch tells a time-out from a lost server only by the exception's type, and the types differ between its stores.
template <typename Call>
auto translated(const char* what, Deadline deadline, const Call& call) -> decltype(call()) {
  try {
    return call();
  } catch (const std::exception& error) {
    const std::string text = error.what();
    if (lacksFiles(text)) {
      ErrorRecord record =
          systemError(ErrorCode::StoreLost, std::string("The store of the process group (") + what + ")", EMFILE);
      record.phase = ErrorPhase::Rendezvous;
      throw Error(record);
    }
    ErrorRecord record;
    record.code = deadline.expired() ? ErrorCode::RendezvousTimeout : ErrorCode::StoreLost;
    record.phase = ErrorPhase::Rendezvous;
    // torch connects when the store is made. So what goes wrong on the network later is the end of the process at the other end.
    const bool closed = !deadline.expired() && dynamic_cast<const c10::DistNetworkError*>(&error) != nullptr;
    record.summary = std::string("The store of the process group ") +
        (deadline.expired() ? "timed out ("
                            : (closed ? "answered before, and has closed since (" : "did not answer (")) +
        what + ").";
    record.cause = text.substr(0, text.find('\n'));
    record.hint = closed
        ? "rank 0, or the launcher that serves the store, ended during the rendezvous; its log has the reason"
        : "check that rank 0 is alive and that MASTER_ADDR and MASTER_PORT name it";
    throw Error(record);
  }
}

// Whether compareSet() with a value that a key does not have writes nothing, also where there is no such key. torch's own example of a
// store that is written in Python writes there.
bool comparesOnly(c10d::Store& store) {
  if (auto* const prefixed = dynamic_cast<c10d::PrefixStore*>(&store)) {
    return comparesOnly(*prefixed->getUnderlyingStore());
  }
  return dynamic_cast<c10d::TCPStore*>(&store) != nullptr || dynamic_cast<c10d::HashStore*>(&store) != nullptr ||
      dynamic_cast<c10d::FileStore*>(&store) != nullptr;
}

} // namespace

StoreAdapter::StoreAdapter(c10::intrusive_ptr<c10d::Store> store)
    : store_(std::move(store)), compares_(comparesOnly(*store_)) {}

void StoreAdapter::set(const std::string& key, const std::string& value) {
  translated("set", Deadline::never(), [&] { store_->set(key, value); });
}

std::string StoreAdapter::get(const std::string& key, Deadline deadline) {
  return translated("get", deadline, [&] {
    const int left = deadline.remainingMs(std::numeric_limits<int>::max());
    beforeWait();
    store_->wait({key}, std::chrono::milliseconds(left > 0 ? left : 1));
    return store_->get_to_str(key);
  });
}

bool StoreAdapter::has(const std::string& key) {
  return translated("check", Deadline::never(), [&] { return store_->check({key}); });
}

// torch's get() waits for a key that its writer has deleted meanwhile, for as long as the store's own timeout.
std::optional<std::string> StoreAdapter::find(const std::string& key) {
  if (!compares_) {
    return Store::find(key);
  }
  if (!has(key)) {
    return std::nullopt;
  }
  return translated("compare_set", Deadline::never(), [&]() -> std::optional<std::string> {
    for (const std::string no_value : {"-", "+"}) { // a value is at most one of the two
      std::string value = store_->compareSet(key, no_value, no_value);
      if (value != no_value) {
        return value;
      }
    }
    return std::nullopt;
  });
}

int64_t StoreAdapter::add(const std::string& key, int64_t amount) {
  return translated("add", Deadline::never(), [&] { return store_->add(key, amount); });
}

bool StoreAdapter::remove(const std::string& key) {
  // A FileStore says of every key that it has deleted it.
  return translated("delete_key", Deadline::never(), [&] { return store_->check({key}) && store_->deleteKey(key); });
}

} // namespace pycomm
