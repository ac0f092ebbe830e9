#include "engine/links/connector.h"

#include <gtest/gtest.h>

#include <thread>

#include "base/error.h"
#include "transport/net/listener.h"

namespace pycomm::testing {
namespace {

// A group that fails while a control link of it opens says who did it. That is not the rank at the other end of that link.
TEST(Connector, AWaitThatTheGroupsFailureEndsThrowsThatFailure) {
  const Listener silent = Listener::bind(SocketAddress::loopback(AddressFamily::IPv4), {});
  GroupIdentity identity;
  identity.rank = 0;
  identity.size = 3;
  identity.hosts = {"host0", "host1", "host2"};
  identity.addresses.assign(3, silent.address());
  ErrorRecord changed;
  changed.code = ErrorCode::DataCorrupt;
  changed.rank = 0;
  changed.peer = 1;
  changed.summary = "Bytes from rank 1 on host1 to rank 0 on host0 were changed.";
  AbortToken abort;
  std::thread fails([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    abort.abort(changed);
  });
  try {
    (void)Connector(identity).openControl(2, Deadline::after(20000), abort, [] {});
    ADD_FAILURE() << "it is up";
  } catch (const Error& error) {
    EXPECT_EQ(error.record().code, ErrorCode::DataCorrupt);
    EXPECT_EQ(error.record().peer, 1);
    EXPECT_EQ(error.record().summary, changed.summary);
  }
  fails.join();
}

} // namespace
} // namespace pycomm::testing
