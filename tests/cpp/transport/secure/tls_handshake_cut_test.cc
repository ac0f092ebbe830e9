// Handshakes that stop, and one that comes in small pieces.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <memory>
#include <utility>

#include "base/error.h"
#include "transport/link_peer.h"
#include "transport/secure/tls_contexts.h"
#include "transport/secure/tls_link.h"
#include "transport/socket_pairs.h"

namespace pycomm::testing {
namespace {

enum class Cut { Fin, Reset, Silence };

/// A handshake of which one end gets the first `nbytes` only.
struct CutShort {
  bool up = false; ///< the end that was cut off; the other end may come up
  ErrorRecord error; ///< the first one, of either end; Ok: none
  size_t whole_nbytes = 0; ///< that it would have got, if nothing was cut
};

CutShort cutShort(bool to_server, size_t nbytes, Cut how) {
  SocketPair near = tcpPair();
  SocketPair far = tcpPair();
  const Context self = newContext();
  std::unique_ptr<TlsLink> client = TlsLink::connect(newContext(), std::move(near.first), self->self());
  std::unique_ptr<TlsLink> server = TlsLink::accept(self, std::move(far.first));
  std::unique_ptr<SocketLink> ends[2] = {std::move(near.second), std::move(far.second)};
  size_t passed[2] = {0, 0};
  bool cut = false;
  CutShort result;
  result.error.code = ErrorCode::Ok;
  std::array<std::byte, 4096> bytes{};
  const auto pass = [&](int from) {
    const bool counted = from == (to_server ? 0 : 1);
    const size_t left = counted ? nbytes - passed[from] : bytes.size();
    if (left > 0 && ends[0] && ends[1]) {
      const size_t got = ends[from]->tryRead({bytes.data(), std::min(left, bytes.size())}).nbytes;
      writeAll(*ends[1 - from], {bytes.data(), got}, soon(), kNoAbort);
      passed[from] += got;
    }
    if (counted && passed[from] == nbytes && how != Cut::Silence && !std::exchange(cut, true)) {
      const linger at_once{1, 0};
      SocketLink& victim = *ends[1 - from];
      if (how == Cut::Reset) {
        EXPECT_EQ(::setsockopt(victim.fd(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once), 0);
        ends[1 - from].reset();
      } else {
        victim.shutdownWrite();
      }
    }
  };
  bool client_up = false;
  bool server_up = false;
  const auto delivered = [&] { // what either side has sent
    for (const Link* end :
         std::initializer_list<const Link*>{client.get(), server.get(), ends[0].get(), ends[1].get()}) {
      EXPECT_TRUE(end == nullptr || waitDelivered(end->fd()));
    }
  };
  try {
    const Deadline deadline = soon();
    for (int turn = 0; turn < 12 || (cut && !deadline.expired());
         ++turn) { // a handshake takes three, and a cut is seen in the end
      client_up = client_up || client->finishConnect();
      delivered();
      pass(0);
      delivered();
      server_up = server_up || server->finishConnect();
      delivered();
      pass(1);
      delivered();
    }
  } catch (const Error& error) {
    result.error = error.record();
  }
  result.up = to_server ? server_up : client_up;
  result.whole_nbytes = passed[to_server ? 0 : 1];
  return result;
}

TEST(TlsHandshakeCut, AHandshakeThatIsCutShortIsNoneAndIsNamed) {
  for (const bool to_server : {true, false}) {
    const size_t whole = cutShort(to_server, 100000, Cut::Silence).whole_nbytes;
    ASSERT_TRUE(cutShort(to_server, whole, Cut::Silence).up);
    ASSERT_GT(whole, 200U);
    for (const Cut how : {Cut::Fin, Cut::Reset, Cut::Silence}) {
      for (size_t nbytes = 0; nbytes < whole; ++nbytes) {
        const CutShort result = cutShort(to_server, nbytes, how);
        EXPECT_FALSE(result.up) << nbytes;
        EXPECT_EQ(result.error.code, how == Cut::Silence ? ErrorCode::Ok : ErrorCode::ConnectionReset)
            << nbytes << " of " << whole << " to the " << (to_server ? "server" : "client") << ": "
            << result.error.text();
      }
    }
  }
}

TEST(TlsHandshakeCut, AFirstMessageInSegmentsOfOneByteIsRead) {
  const Context client = newContext();
  const Context server = newContext();
  SocketPair near = tcpPair();
  SocketPair far = tcpPair();
  const auto at_client = TlsLink::connect(client, std::move(near.first), server->self());
  const auto at_server = TlsLink::accept(server, std::move(far.first));
  size_t segments = 0;
  bool client_up = false;
  bool server_up = false;
  for (const Deadline deadline = soon(); !(client_up && server_up);) {
    ASSERT_FALSE(deadline.expired());
    client_up = client_up || at_client->finishConnect();
    std::byte byte{};
    while (near.second->tryRead({&byte, 1}).nbytes == 1) {
      writeAll(*far.second, {&byte, 1}, soon(), kNoAbort);
      ASSERT_TRUE(server_up || waitReadable(at_server->fd()));
      server_up = server_up || at_server->finishConnect();
      ++segments;
    }
    std::array<std::byte, 4096> bytes{};
    writeAll(*near.second, {bytes.data(), far.second->tryRead({bytes.data(), bytes.size()}).nbytes}, soon(), kNoAbort);
  }
  EXPECT_GT(segments, 300U);
  EXPECT_EQ(at_server->peer(), client->self());
}

} // namespace
} // namespace pycomm::testing
