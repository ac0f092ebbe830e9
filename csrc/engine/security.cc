#include "engine/security.h"

#include <atomic>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/log.h"

namespace pycomm {
namespace {

std::atomic<bool> g_warned{false};
std::atomic<bool> g_warned_of_variable{false};

constexpr const char* kSecretVariable = "PYCOMM_SECRET";

std::string howToClose() {
  return std::string("if no host has a secret, run on one of them: python -m pycomm secret --generate. Then ") +
      kHowToCopySecret;
}

} // namespace

std::shared_ptr<const TlsContext> Security::open() const {
  if (secret == nullptr) {
    return nullptr;
  }
  if (policy == SecurityPolicy::Off) {
    throw Error(
        ErrorCode::InvalidArgument,
        "there is a secret (" + secret_origin + ") and PYCOMM_SECURITY=off",
        "on every host: unset PYCOMM_SECURITY, and the secret protects the job; or PYCOMM_SECRET_FILE=none, and it runs without TLS");
  }
  return std::make_shared<const TlsContext>(secret, newProcessId(), tls);
}

std::shared_ptr<const TlsContext> Security::open(const Store& store) const {
  std::shared_ptr<const TlsContext> context = open();
  if (context != nullptr && !store.sealed()) {
    throw Error(ErrorCode::Internal, "a group with a secret would meet in a store without seals");
  }
  return context;
}

void Security::checkHosts(const Roster& roster) const {
  if (secret != nullptr) {
    const bool far = roster.topology.hosts() > 1 && secret_origin == kSecretVariable;
    if (far && roster.identity.rank == 0 && !g_warned_of_variable.exchange(true)) {
      log(LogLevel::Warn,
          std::string("the secret is in the environment (") + kSecretVariable +
              "), where /proc, docker inspect and Slurm's records show it. Try: write its text into a file, run chmod 600 on that, set "
              "PYCOMM_SECRET_FILE to its path, and unset PYCOMM_SECRET");
    }
    return;
  }
  if (policy == SecurityPolicy::Off) {
    return;
  }
  if (roster.topology.hosts() == 1) {
    if (policy == SecurityPolicy::Require && roster.identity.hasPorts()) {
      throw Error(
          ErrorCode::InvalidArgument,
          "PYCOMM_SECURITY=require, but there is no secret and the ranks of " + roster.identity.text() +
              " do not all reach each other by Unix sockets: only torch's store says that they are on one host, and it is not protected",
          "leave transport at auto and start all ranks as one user; or give the user of each rank the same secret (python -m pycomm "
          "secret --generate, once, and copy the file). PYCOMM_DEBUG=INFO names the rank that is not reached");
    }
    return;
  }
  const std::string what = "the ranks of " + roster.identity.text() + " are on " +
      std::to_string(roster.topology.hosts()) +
      " hosts and there is no secret: anybody on the network between them can read and change what they send";
  if (policy == SecurityPolicy::Require) {
    throw Error(ErrorCode::InvalidArgument, "PYCOMM_SECURITY=require, but " + what, howToClose());
  }
  if (roster.identity.rank == 0 && !g_warned.exchange(true)) {
    log(LogLevel::Warn, what + ". See python -m pycomm secret --help");
  }
}

void Security::finish(Roster& roster, const std::string& transcript, std::shared_ptr<const TlsContext> tls) const {
  if (tls == nullptr) {
    return;
  }
  const auto derive = [&](const char* purpose, auto& into) {
    const Key key = secret->derive(purpose + transcript);
    static_assert(sizeof into <= Key::kNbytes);
    std::memcpy(&into, key.bytes(), sizeof into);
  };
  derive("pycomm 1 memory", roster.identity.memory_key);
  derive("pycomm 1 unix", roster.identity.unix_nonce);
  roster.identity.tls = std::move(tls);
}

} // namespace pycomm
