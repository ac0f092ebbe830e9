#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/abort_token.h"
#include "base/deadline.h"
#include "transport/net/address.h"

namespace pycomm {

/// Host names looked up, each once: getaddrinfo() cannot be interrupted and takes 5 to 30 s if a name server does not answer, so it runs
/// on a thread of its own, and every group that needs the same name waits for the same answer.
///
/// Thread: any. A lookup that is never answered keeps its thread and its part of this object, also after the destructor.
class NameLookups {
 public:
  using Resolver = std::function<std::vector<SocketAddress>(const std::string& host)>;

  /// `resolver` throws Error for a name without an address.
  explicit NameLookups(Resolver resolver = [](const std::string& host) { return resolve(host); });

  /// All addresses of a name or literal; none if it has no address (the next call asks again), or if there is no answer by half of the
  /// time until `deadline`, and after 30 s at the latest: then a warning is logged, and later calls do not wait until there is an answer.
  /// Throws the token's reason.
  [[nodiscard]] std::vector<SocketAddress> find(const std::string& host, Deadline deadline, const AbortToken& abort);

 private:
  struct Lookup {
    bool answered = false;
    bool given_up = false; ///< somebody has waited in vain
    std::vector<SocketAddress> addresses;
  };
  struct Shared { ///< with the threads
    std::mutex mutex; ///< guards the rest
    std::condition_variable changed;
    std::map<std::string, Lookup> by_host;
  };

  const Resolver resolver_;
  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

/// Of all groups of this process. Never destroyed: a name server may answer while the process ends.
[[nodiscard]] NameLookups& nameLookups();

} // namespace pycomm
