#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/error.h"
#include "transport/link_peer.h"
#include "transport/secure/tls_contexts.h"
#include "transport/secure/tls_link.h"
#include "transport/socket_pairs.h"

namespace pycomm::testing {

/// A handshake in one thread. What an end throws is its error.
struct Handshake {
  ErrorRecord client;
  ErrorRecord server;

  [[nodiscard]] bool good() const {
    return client.code == ErrorCode::Ok && server.code == ErrorCode::Ok;
  }
};

inline Handshake shake(Link& client, Link& server) {
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

inline TlsPair unconnected(const Context& client, const Context& server) {
  SocketPair under = tcpPair();
  return {
      TlsLink::connect(client, std::move(under.first), server->self()),
      TlsLink::accept(server, std::move(under.second))};
}

// OpenSSL with some functions replaced, for an end that does not behave.
inline const OpenSsl* misbehaving(const std::function<void(OpenSsl&)>& change) {
  static std::vector<std::unique_ptr<OpenSsl>> all; // contexts borrow them
  all.push_back(std::make_unique<OpenSsl>(openSsl()));
  change(*all.back());
  return all.back().get();
}

inline Context contextWith(const OpenSsl* ssl, const TlsOptions& options = {}) {
  return std::make_shared<const TlsContext>(theSecret(), newProcessId(), options, *ssl);
}

/// A function of OpenSSL's that pycomm does not use.
template <class Function>
Function* libssl(const char* name) {
  void* const library = ::dlopen("libssl.so.3", RTLD_NOW | RTLD_NOLOAD);
  return reinterpret_cast<Function*>(::dlsym(library, name));
}

} // namespace pycomm::testing
