#include "transport/secure/tls_link.h"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <cstring>
#include <ctime>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "transport/link_peer.h"
#include "transport/loopback.h"
#include "transport/net/listener.h"
#include "transport/net/tcp_link.h"
#include "transport/wire.h"

namespace pycomm {
namespace {

using testing::Bytes;
using testing::errorOf;
using ::testing::HasSubstr;
using testing::kLoopback;
using testing::LinkCase;
using testing::LinkConformance;
using testing::LinkPair;
using testing::pattern;
using testing::PeerPlace;
using testing::readExactly;
using testing::soon;

std::shared_ptr<const Secret> secretOfTheJob() {
  static const auto secret = std::make_shared<const Secret>(Secret::generate());
  return secret;
}

using Context = std::shared_ptr<const TlsContext>;

Context contextOf(const std::shared_ptr<const Secret>& secret = secretOfTheJob(), const TlsOptions& options = {}) {
  return std::make_shared<const TlsContext>(secret, newProcessId(), options);
}

LinkPair sockets() {
  Listener listener = Listener::bind(kLoopback, {});
  auto first = connectTcp(kLoopback, listener.address(), Deadline::after(10000), AbortToken());
  pollfd wait{listener.fd(), POLLIN, 0};
  (void)::poll(&wait, 1, 10000);
  auto incoming = listener.accept();
  if (!incoming) {
    throw Error(ErrorCode::Timeout, "nobody connected");
  }
  return {std::move(first), std::make_unique<TcpLink>(std::move(incoming->fd))};
}

/// A handshake in one thread. What an end throws is its error.
struct Handshake {
  ErrorRecord client;
  ErrorRecord server;

  [[nodiscard]] bool good() const {
    return client.code == ErrorCode::Ok && server.code == ErrorCode::Ok;
  }
};

Handshake shake(Link& client, Link& server) {
  Handshake result;
  result.client.code = result.server.code = ErrorCode::Ok;
  bool client_done = false;
  bool server_done = false;
  const auto step = [](Link& link, bool& done, ErrorRecord& record) {
    if (!done) {
      try {
        done = link.finishConnect();
      } catch (const Error& error) {
        record = error.record();
        done = true;
      }
    }
  };
  for (const Deadline deadline = soon(); !(client_done && server_done) && !deadline.expired();) {
    step(client, client_done, result.client);
    step(server, server_done, result.server);
  }
  EXPECT_TRUE(client_done && server_done);
  return result;
}

struct TlsPair {
  std::unique_ptr<TlsLink> client;
  std::unique_ptr<TlsLink> server;
};

TlsPair unconnected(const Context& client, const Context& server) {
  LinkPair under = sockets();
  return {
      TlsLink::connect(client, std::move(under.first), server->self()),
      TlsLink::accept(server, std::move(under.second))};
}

TlsPair connected(const TlsOptions& options = {}) {
  TlsPair pair = unconnected(contextOf(secretOfTheJob(), options), contextOf(secretOfTheJob(), options));
  const Handshake result = shake(*pair.client, *pair.server);
  if (!result.good()) {
    throw std::runtime_error(result.client.text() + "\n" + result.server.text());
  }
  return pair;
}

LinkPair connectedLinks(const TlsOptions& options = {}) {
  TlsPair pair = connected(options);
  return {std::move(pair.client), std::move(pair.server)};
}

INSTANTIATE_TEST_SUITE_P(
    Tls,
    LinkConformance,
    ::testing::Combine(
        ::testing::Values(
            LinkCase{"Tls", [] { return connectedLinks(); }},
            LinkCase{
                "TlsFromTheServer",
                [] {
                  LinkPair pair = connectedLinks();
                  return LinkPair{std::move(pair.second), std::move(pair.first)};
                }},
            LinkCase{"TlsWithANewKeyForEachRecord", [] { return connectedLinks({1}); }}),
        ::testing::Values(PeerPlace::Thread, PeerPlace::Process)),
    [](const auto& test) {
      return std::get<0>(test.param).name + (std::get<1>(test.param) == PeerPlace::Thread ? "Thread" : "Process");
    });

} // namespace
} // namespace pycomm
