#include "engine/security.h"

#include <atomic>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/log.h"

namespace pycomm {
namespace {

std::atomic<bool> g_warned{false};

constexpr const char* kHowToClose =
    "python -m pycomm secret --generate, then copy the file to every host (scp -p); PYCOMM_SECURITY=off if nobody else reaches the "
    "network between the hosts";

} // namespace

std::shared_ptr<const TlsContext> Security::open(const Store& store) const {
  if (secret == nullptr) {
    return nullptr;
  }
  if (policy == SecurityPolicy::Off) {
    throw Error(
        ErrorCode::InvalidArgument,
        "there is a secret (" + secret_origin + ") and PYCOMM_SECURITY=off",
        "unset PYCOMM_SECURITY to protect the job with the secret; without the secret the job is open");
  }
  if (!store.sealed()) {
    throw Error(ErrorCode::Internal, "a group with a secret would meet in a store without seals");
  }
  return std::make_shared<const TlsContext>(secret, newProcessId(), tls);
}

void Security::checkHosts(const Roster& roster) const {
  if (secret != nullptr || roster.topology.hosts() == 1 || policy == SecurityPolicy::Off) {
    return;
  }
  const std::string what = "the ranks of group " + roster.identity.name + " are on " +
      std::to_string(roster.topology.hosts()) +
      " hosts and there is no secret: whoever reaches the network between them can read and change what they send";
  if (policy == SecurityPolicy::Require) {
    throw Error(ErrorCode::InvalidArgument, "PYCOMM_SECURITY=require, but " + what, kHowToClose);
  }
  if (roster.identity.rank == 0 && !g_warned.exchange(true)) {
    log(LogLevel::Warn, what + ". Try: " + kHowToClose);
  }
}

void Security::finish(Roster& roster, const std::string& transcript, std::shared_ptr<const TlsContext> tls) const {
  if (tls == nullptr) {
    return;
  }
  const Key key = secret->derive("pycomm 1 memory" + transcript);
  std::memcpy(&roster.identity.memory_key, key.bytes(), sizeof roster.identity.memory_key);
  roster.identity.tls = std::move(tls);
}

} // namespace pycomm
